// Inside Airflow the page follows Airflow's theme; alone, the system's.
(() => {
  const follow = () => {
    try {
      const airflow = window.parent !== window && window.parent.document.documentElement;
      const named = airflow && ["dark", "light"].find((name) => airflow.classList.contains(name));
      if (named) document.documentElement.dataset.theme = named;
    } catch { /* another origin's frame: the system's theme stays */ }
  };
  follow();
  try {
    if (window.parent !== window)
      new MutationObserver(follow).observe(window.parent.document.documentElement, { attributeFilter: ["class"] });
  } catch { /* as above */ }
})();
