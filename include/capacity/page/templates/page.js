// Fetches the limits into the page, filters them, and reads them again every few minutes.
(() => {
  const EVERY_MS = 5 * 60 * 1000;
  const main = document.getElementById("main");
  const chosen = { text: "", class: "", status: "" };
  const part = (id) => document.getElementById(id);

  const apply = () => {
    const words = chosen.text.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...document.querySelectorAll("tbody.limit")];
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !(
        words.every((word) => text.includes(word)) &&
        (!chosen.class || row.dataset.class === chosen.class) &&
        (!chosen.status || row.dataset.states.split(" ").includes(chosen.status))
      );
      if (!row.hidden) shown += 1;
    }
    part("filter-said").textContent = `${shown} of ${rows.length} shown`;
    part("filter-none").hidden = shown > 0;
    part("filter-clear").disabled = !Object.values(chosen).some(Boolean);
  };

  const wire = () => {
    const filters = document.querySelector(".filters");
    if (!filters) return;
    filters.hidden = false;
    for (const [name, event] of [["text", "input"], ["class", "change"], ["status", "change"]]) {
      const field = part(`filter-${name}`);
      field.value = chosen[name];
      if (field.value !== chosen[name]) chosen[name] = field.value = "";  // no such choice any more
      field.addEventListener(event, () => { chosen[name] = field.value; apply(); });
    }
    part("filter-clear").addEventListener("click", () => {
      for (const name of Object.keys(chosen)) part(`filter-${name}`).value = chosen[name] = "";
      apply();
      part("filter-text").focus();
    });
    part("reload").addEventListener("click", () => load(true));
    apply();
  };

  const show = (html, focus) => {
    const at = document.activeElement && document.activeElement.id;
    const open = [...document.querySelectorAll("details")].map((details) => details.open);
    const inner = html.slice(html.indexOf("<main"), html.lastIndexOf("</main>"));  // styles stay as they are
    const found = new DOMParser().parseFromString(inner, "text/html").querySelector("main");
    main.replaceChildren(...found.childNodes);
    document.querySelectorAll("details").forEach((details, at) => { if (at in open) details.open = open[at]; });
    wire();
    if (focus && at && part(at)) part(at).focus();
  };

  const complain = (words) => {
    main.innerHTML = '<h1>Capacity</h1><div class="notice bad" role="alert"><p></p></div>' +
      '<p class="actions"><button type="button">Try again</button></p>';
    main.querySelector(".notice p").textContent = words;
    main.querySelector("button").addEventListener("click", () => location.reload());
  };

  const load = async (focus) => {
    try {
      main.setAttribute("aria-busy", "true");
      const answer = await fetch("limits", { credentials: "same-origin" });
      show(await answer.text(), focus);
    } catch {
      complain("Airflow's API server cannot be reached, so the limits cannot be shown.");
    } finally {
      main.removeAttribute("aria-busy");
    }
  };

  load(false);
  setInterval(() => { if (!document.hidden) load(true); }, EVERY_MS);
})();
