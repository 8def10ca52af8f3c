"""The rendered reports: order, golden facts, marks, escaping, figures."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from include.capacity.errors import DataError
from include.capacity.flow.sweep import compare
from include.capacity.policy import policy_files
from include.capacity.publish.documents import check
from include.capacity.report.build import (
    build_fleet_report,
    build_model_report,
    fleet_values,
    markdown_text,
    render,
)
from include.capacity.report.data import binomial_bounds, curve_of, judged_steps, read_model
from include.capacity.report.figures import fleet_drawings, model_drawings
from include.capacity.report.words import percent, rate, seconds
from include.capacity.results.store import FolderStore
from include.capacity.results.sweepdir import SweepDir
from tests.report.conftest import Built
from tests.report.fixtures import STEADY, make_sweep

ORDER = [
    "Limits",
    "How sure",
    "What bound them",
    "May I trust the measurement?",
    "What to do",
    "Evidence",
]


def plain(page: str) -> str:
    """A page's text without tags, on one line."""
    page = re.sub(r"<(style|svg)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


@pytest.mark.parametrize("model", ["steady", "sprinter"])
def test_order_of_sections(built: Built, model: str) -> None:
    page, markdown = built.page(model, "report.html"), built.page(model, "report.md")
    assert re.findall(r"<h2 [^>]*>(.*?)</h2>", page) == ORDER
    assert re.findall(r"^## (.*)$", markdown, flags=re.MULTILINE) == ORDER
    assert re.findall(r"<h2 [^>]*>(.*?)</h2>", built.fleet.read("report.html").decode()) == ORDER


def test_files_for_gateways_are_linked(built: Built) -> None:
    page, markdown = built.page("steady", "report.html"), built.page("steady", "report.md")
    sweep = built.sweeps["steady"]
    files = set(policy_files(sweep.read_json("sweep.json"), sweep.read_json("limits.json")))
    linked = {*re.findall(r'href="(policy/[^"]+)"', page)}
    assert "policy/alone/interactive/nginx.conf" in linked
    assert linked == {*re.findall(r"\]\((policy/[^)]+)\)", markdown)}
    assert linked == {name for name in files if not name.endswith(("NO-LIMIT.txt", "index.json"))}
    assert "limits measured alone do not add up" in plain(page)


def test_changes_have_their_place_when_history_is_given(built: Built, tmp_path: Path) -> None:
    sweep = SweepDir(FolderStore(tmp_path))
    for name in ("sweep.json", "limits.json", "quality.json", "steps.csv"):
        sweep.write(name, built.sweeps["steady"].read(name))
    limit = built.models["steady"].limit("interactive")
    assert limit is not None
    old = {**limit, "limit": 4 * limit["limit"], "bracket": [4 * limit["limit"], 5 * limit["limit"]]}
    old["evidence"] = {**limit["evidence"], "concurrency": old["limit"]}
    compare(sweep, history_of(old, stack={"engine": "simulator", "version": "0.0"}))
    build_model_report(sweep)
    page = sweep.read("report.html").decode()
    assert re.findall(r"<h2 [^>]*>(.*?)</h2>", page) == [*ORDER[:3], "What changed", *ORDER[3:]]
    assert (
        f"the limit fell from {4 * limit['limit']} to {limit['limit']} (−75 %) after run r0 (the evidence is "
        "strong); the stack has changed: version 0.0 -> 0.1; profile (none) -> steady; "
        "max num seqs (none) -> 24." in plain(page)
    )
    check(sweep.read_json("limits.json"), "limits", "limits.json")


def history_of(*limits: dict[str, Any], stack: dict[str, Any]) -> list[dict[str, Any]]:
    """Earlier runs r0, r1 ... of the model steady, one a night."""
    return [
        {
            "run_id": f"r{at}",
            "published_at": f"2026-11-{1 + at:02d}T05:00:00+00:00",
            "models": {
                "steady": {
                    "measured_at": f"2026-11-{1 + at:02d}T01:00:00+00:00",
                    "stack_id": "other",
                    "stack": stack,
                    "limits": [limit],
                }
            },
        }
        for at, limit in enumerate(limits)
    ]


def test_limits_over_time(built: Built) -> None:
    limit = built.models["steady"].limit("interactive")
    assert limit is not None
    nights = [
        {**limit, "limit": 12, "bracket": [12, 13]},
        {**limit, "limit": 10, "bracket": [10, 11], "status": "lower_bound"},
        {**limit, "limit": None, "status": "no_passing_step", "bracket": [None, 1], "failing": None},
        {**limit, "limit": None, "status": "rejected", "bracket": [None, None]},
        {**limit, "deadline_s": 1.0},
    ]
    drawings = fleet_drawings(list(built.models.values()), history_of(*nights, stack={}))
    assert [drawing.name for drawing in drawings] == [
        "fleet-interactive",
        "history-interactive",
        "fleet-batch",
    ]
    assert drawings[1].caption == (
        f"steady: {limit['limit']} in this run, 10 to 12 in the 2 comparable before it that found one; "
        "in 1 no step passed. "
        "Hollow markers are lower bounds; a cross at 0 is a run in which no step passed."
    )
    assert "Nov" in "".join(ET.fromstring(drawings[1].svg).itertext())


@pytest.mark.parametrize("model", ["steady", "sprinter"])
def test_every_limit_with_its_claim_and_evidence(built: Built, model: str) -> None:
    page, markdown = plain(built.page(model, "report.html")), built.page(model, "report.md")
    limits = built.sweeps[model].read_json("limits.json")["limits"]
    assert [entry["class"] for entry in limits] == ["interactive", "batch"]
    for entry in limits:
        assert entry["claim"] in page
        assert entry["claim"] in markdown
        evidence = entry["evidence"]
        assert evidence["n"] >= 600
        row = next(
            line
            for line in markdown.splitlines()
            if line.startswith(f"| {model} | {entry['class']} | {entry['limit']} | {evidence['n']:,} |")
        )
        assert percent(evidence["completion_lower"]) in row
        assert seconds(evidence["seconds"]) in row


def test_every_percentile_stands_with_its_n(built: Built) -> None:
    page = built.page("steady", "report.html")
    heads = [plain(head) for head in re.findall(r"<thead>(.*?)</thead>", page, flags=re.DOTALL)]
    latency = [head for head in heads if "TTFT p95" in head and "in flight" in head]
    assert len(latency) == 2
    for head in latency:
        assert "TTFT p50 TTFT p95 TTFT p99 TTFT n TPOT p50" in head
        assert head.endswith("E2E p50 E2E p95 E2E p99 E2E n")
    steps = built.models["steady"].steps
    proof = steps[(steps["phase"] == "prove") & (steps["service_class"] == "interactive")].iloc[-1]
    line = f"{seconds(proof['ttft_p95_s'])} {seconds(proof['ttft_p99_s'])} {proof['ttft_n']:,.0f}"
    assert line in plain(page)


def test_steps_show_bounds_outcomes_and_interval(built: Built) -> None:
    page = plain(built.page("sprinter", "report.html"))
    steps = built.models["sprinter"].steps
    shed = steps[(steps["service_class"] == "interactive") & (steps["rejected"] > 0)].iloc[0]
    assert f"rejected (429, 503) {shed['rejected']:,.0f}" in page
    assert f"{percent(shed['y_lower'])} to {percent(shed['y_upper'])}" in page
    proof = steps[(steps["phase"] == "prove") & (steps["service_class"] == "interactive")].iloc[-1]
    assert f"{rate(proof['request_per_s_low'])} to {rate(proof['request_per_s_high'])}" in page


def test_fleet_says_that_the_faster_model_has_the_lower_limit(built: Built) -> None:
    expected = re.compile(
        r"sprinter has more raw throughput than steady \([\d,]+ vs [\d,]+ tok/s at their peaks\), yet its "
        r"safe interactive limit is lower \(11 vs 2\d\): it sheds [\d.]+ % at \d+ \(n [\d,]+\)\."
    )
    assert expected.search(plain(built.fleet.read("report.html").decode()))
    assert expected.search(built.fleet.read("report.md").decode())


def test_fleet_names_the_failed_model_and_links_the_others(built: Built) -> None:
    page = built.fleet.read("report.html").decode()
    assert "broken The server died at start: out of memory." in plain(page)
    assert 'href="./steady/report.html"' in page
    assert 'href="./sprinter/report.html"' in page
    assert "run nightly-2026-11-30" in plain(page)


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_simulated_is_marked_at_top_and_bottom(built: Built, name: str) -> None:
    for page in (built.page("steady", name), built.fleet.read(name).decode()):
        shown = plain(page) if name.endswith("html") else page
        mark = "SIMULATED: time scale 20x. The server is a simulation"
        assert mark in shown.replace("**", "")
        assert shown.count("SIMULATED") == 2


def test_real_servers_are_not_marked(tmp_path: Path) -> None:
    sweep = make_sweep(
        FolderStore(tmp_path), "", "real", STEADY, simulated=False, ladders={"interactive": [1, 4]}
    )
    build_model_report(sweep)
    assert "SIMULATED" not in sweep.read("report.html").decode()
    assert "SIMULATED" not in sweep.read("report.md").decode()


def test_pages_are_self_contained(built: Built) -> None:
    for page in (built.page("steady", "report.html"), built.fleet.read("report.html").decode()):
        assert not re.search(r"<(script|link|img|iframe)\b", page)
        assert "@import" not in page
        assert not re.search(r"""(src|href)=["'](https?:)?//""", page)
        assert page.count("<svg") >= 2
        ids = re.findall(r'\bid="([^"]+)"', page)
        assert len(ids) == len(set(ids))
        used = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
        assert used <= set(ids)


def test_tables_are_accessible(built: Built) -> None:
    page = built.page("sprinter", "report.html")
    tables = re.findall(r"<table>(.*?)</table>", page, flags=re.DOTALL)
    assert len(tables) >= 8
    for table in tables:
        assert re.search(r"<caption>\S", table)
        assert '<th scope="col"' in table
        assert '<th scope="row">' in table
    assert '<html lang="en">' in page
    figures = re.findall(r'<svg[^>]*role="img"[^>]*aria-labelledby="([^"]+)"', page)
    assert len(figures) == page.count("<svg")
    assert all(f'<title id="{label}">' in page for label in figures)


def test_figures_are_files_and_whole_xml(built: Built) -> None:
    names = built.sweeps["steady"].names("figures/")
    assert names == sorted(
        f"figures/{kind}-{figure}.{suffix}"
        for kind in ("batch", "interactive")
        for figure in ("throughput", "latency", "completion", "outcomes", "server")
        for suffix in ("png", "svg")
    )
    for name in names:
        content = built.sweeps["steady"].read(name)
        if name.endswith("png"):
            assert content.startswith(b"\x89PNG")
        else:
            assert ET.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
            assert len(content) < 80_000
            assert b"<dc:date>" not in content


def test_the_fleets_figures_are_files_that_its_markdown_shows(built: Built) -> None:
    names = [
        f"figures/fleet-{kind}.{suffix}" for kind in ("batch", "interactive") for suffix in ("png", "svg")
    ]
    assert set(built.fleet.names("figures/")) == set(names)
    page = built.fleet.read("report.md").decode()
    assert re.findall(r"!\[.*\]\((.*)\)", page) == [
        "./figures/fleet-interactive.png",
        "./figures/fleet-batch.png",
    ]
    assert all(built.fleet.read(name).startswith(b"\x89PNG") for name in names if name.endswith("png"))


def test_figures_are_deterministic(built: Built) -> None:
    first = next(iter(model_drawings(built.models["steady"])))
    again = next(iter(model_drawings(read_model(built.sweeps["steady"]))))
    assert (first.svg, first.png) == (again.svg, again.png)


def test_captions_are_computed(built: Built) -> None:
    captions = {drawing.name: drawing.caption for drawing in model_drawings(built.models["sprinter"])}
    assert re.match(
        r"Throughput of completed requests (peaks at|still rises)", captions["interactive-throughput"]
    )
    assert re.match(
        r"The completion rate first falls below its floor of 99 % at \d+: [\d.]+ % \(n \d+, one-sided 95 %",
        captions["interactive-completion"],
    )
    assert re.match(
        r"Of [\d,]+ attempted requests [\d,]+ failed: rejected \(429, 503\) [\d,]+ and connection lost \d+\.",
        captions["interactive-outcomes"],
    )


HOSTILE = '<script>alert("x")</script> | $x_{1}$ *b* [l](javascript:1) & "q"'


def test_hostile_names_are_text(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    sweep = make_sweep(
        store,
        "m",
        HOSTILE,
        STEADY,
        ladders={"interactive": [1, 4]},
        changes={"served_name": HOSTILE, "stack": {HOSTILE: HOSTILE}, "stack_id": HOSTILE},
    )
    build_model_report(sweep)
    build_fleet_report({HOSTILE: sweep}, SweepDir(store), {"run_id": HOSTILE, "failed": {HOSTILE: HOSTILE}})
    for page in (sweep.read("report.html").decode(), store.read("report.html").decode()):
        assert "<script" not in page
        assert "&lt;script&gt;" in page
        assert page.count("<table>") == page.count("</table>")
    for markdown in (sweep.read("report.md").decode(), store.read("report.md").decode()):
        assert "<script" not in markdown
        assert not re.search(r"(?<!\\)\]\(javascript:", markdown)
        assert r"\*b\*" in markdown
    for name in sweep.names("figures/"):
        if name.endswith("svg"):
            assert "<script" not in ET.tostring(ET.fromstring(sweep.read(name)), encoding="unicode")


class Tags(HTMLParser):
    """The tags and attributes of a page, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str]] = set()
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen |= {(tag, name) for name, _ in attrs} | {(tag, "")}

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def tags_of(name: str) -> Tags:
    """What a fleet's page consists of whose fleet, run and failed model have this name."""
    values = fleet_values({}, {name: name}, {"run_id": name, "fleet": name, "missed": [name]}, [])
    tags = Tags()
    tags.feed(render("fleet.html.j2", values))
    return tags


@settings(max_examples=60, deadline=None)
@given(
    st.text(min_size=1, max_size=40).filter(str.strip)
    | st.sampled_from([HOSTILE, "<svg/onload=x>", "{{ 7*7 }}"])
)
def test_no_name_becomes_part_of_the_page(name: str) -> None:
    tags = tags_of(name)
    assert tags.seen == tags_of("plain").seen
    assert any(name == word for word in tags.words)


def test_many_steps_and_long_names_fit_into_their_figures(tmp_path: Path) -> None:
    """Of 40 bars every third is labelled, and a name of 300 letters takes no more than its share."""
    store = FolderStore(tmp_path)
    sweep = make_sweep(store, "m", "_" + "x" * 300, ladders={"interactive": list(range(1, 41))}, mode="exact")
    drawings = {drawing.name: drawing for drawing in model_drawings(read_model(sweep))}
    words = [text.strip() for text in ET.fromstring(drawings["interactive-outcomes"].svg).itertext()]
    assert [word for word in words if word.isdecimal() and word not in ("0", "20", "60", "80", "100")][
        :14
    ] == ["1", "4", "7", "10", "13", "16", "19", "22", "25", "28", "31", "34", "37", "40"]
    (fleet,) = fleet_drawings([read_model(sweep), read_model(make_sweep(store, "n", "n"))])[:1]
    legend = [text for text in ET.fromstring(fleet.svg).itertext() if "xxx" in text]
    assert f"\u200b_{'x' * 38}…" in legend


def test_markdown_text_stays_in_its_cell() -> None:
    assert markdown_text("a|b\n# c `d` _e_") == r"a\|b # c \`d\` \_e\_"
    assert markdown_text("<b>") == "&lt;b&gt;"


# -- what is used and what is not


def test_rejected_steps_are_shown_but_not_used(built: Built, tmp_path: Path) -> None:
    sweep = SweepDir(FolderStore(tmp_path))
    for name in ("sweep.json", "limits.json", "steps.csv", "quality.json"):
        sweep.write(name, built.sweeps["steady"].read(name))
    quality = sweep.read_json("quality.json")
    top = max(
        (
            step
            for step in quality["steps"]
            if step["service_class"] == "interactive" and step["phase"] == "scout"
        ),
        key=lambda step: step["concurrency"],
    )
    top["verdict"] = "reject"
    top["findings"] = [
        {"check": "concurrency_reached", "severity": "reject", "reason": "Only 40 of 64 were in flight."}
    ]
    sweep.write_json("quality.json", quality)
    build_model_report(sweep)
    page = sweep.read("report.html").decode()
    assert top["concurrency"] not in read_model(sweep).curve("interactive").index
    assert "Only 40 of 64 were in flight." in plain(page)
    assert page.count('<tr class="unused">') == 3
    assert "1 rejected." in plain(page)


@pytest.mark.parametrize("kept", [{"interactive"}, {"batch"}, set()])
def test_a_class_without_a_usable_step_stops_no_report(built: Built, tmp_path: Path, kept: set[str]) -> None:
    """A model that has not every class of the fleet, or whose steps of one were all rejected."""
    store = FolderStore(tmp_path)
    rejected, partial = SweepDir(store, "rejected"), SweepDir(store, "partial")
    for sweep in (rejected, partial):
        for name in ("sweep.json", "limits.json", "steps.csv", "quality.json"):
            sweep.write(name, built.sweeps["steady"].read(name))
    quality = rejected.read_json("quality.json")
    for step in quality["steps"]:
        if step["service_class"] not in kept:
            step["verdict"] = "reject"
    rejected.write_json("quality.json", quality)
    steps = partial.steps()
    partial.write_steps(steps[steps["service_class"].isin(kept)])
    partial.write_json("limits.json", {"limits": []})
    models = {"rejected": rejected, "partial": partial, "sprinter": built.sweeps["sprinter"]}
    drawings = fleet_drawings([read_model(sweep) for sweep in models.values()])
    drawn = ["fleet-interactive", "fleet-batch"]
    assert [drawing.name for drawing in drawings] == drawn
    for drawing in drawings:
        _, _, service_class = drawing.name.partition("-")
        named = drawing.caption.count("completed requests/s, at")
        assert named == (3 if service_class in kept else 1)
    found = {name.partition("-")[0].rpartition("/")[2] for name in _figures_of(rejected)}
    assert found == kept
    build_fleet_report(models, SweepDir(store), {"run_id": "r"})
    assert "rejected" in store.read("report.md").decode()


def test_nothing_is_concluded_from_a_rejected_measurement(built: Built, tmp_path: Path) -> None:
    sweep = SweepDir(FolderStore(tmp_path))
    for name in ("sweep.json", "limits.json", "steps.csv", "quality.json"):
        sweep.write(name, built.sweeps["steady"].read(name))
    limits = sweep.read_json("limits.json")
    for entry in limits["limits"]:
        entry |= {"status": "rejected", "limit": None, "bracket": [None, 32], "best_estimate": 8.7}
        entry |= {"server_bound_by": "slots", "claim": "No limit: client-bound.", "bound_by": None}
    sweep.write_json("limits.json", limits)
    build_model_report(sweep)
    page = plain(sweep.read("report.html").decode())
    for said in ("Best estimate", "In the server's own terms", "first not passing 32", "yes, with findings"):
        assert said not in page, said
    assert "no Of " in page
    assert "The measurement was rejected: what follows is of the steps that were not." in page


def _figures_of(sweep: SweepDir) -> list[str]:
    return [drawing.name for drawing in model_drawings(read_model(sweep))]


def test_unchecked_data_says_so(built: Built, tmp_path: Path) -> None:
    sweep = SweepDir(FolderStore(tmp_path))
    for name in ("sweep.json", "limits.json", "steps.csv"):
        sweep.write(name, built.sweeps["steady"].read(name))
    build_model_report(sweep)
    assert "not checked The data were not checked." in plain(sweep.read("report.html").decode())


def test_imported_steps_without_rows_or_limits(tmp_path: Path) -> None:
    sweep = SweepDir(FolderStore(tmp_path))
    about = {"model": "llama", "source": "imported", "imported_from": ["s3://theirs/2026/study.csv"]}
    sweep.write_json("sweep.json", {**about, "files": {"study.csv": "tidy CSV"}})
    steps = pd.DataFrame(
        {
            "model": "llama",
            "source": "study.csv",
            "concurrency": [500, 600, 700],
            "total_tok_per_s": [60131.0, 59800.0, 60500.0],
            "e2e_p99_s": [9.0, 11.0, 13.0],
        }
    )
    sweep.write_steps(steps)
    build_model_report(sweep)
    page = plain(sweep.read("report.html").decode())
    assert "Imported results: llama" in page
    assert "numbers, imported from s3://theirs/2026/study.csv (tidy CSV). They were not measured here" in page
    assert "of 3 steps of llama, 3 may be used. They say how throughput and latency changed" in page
    assert "Of completion they say nothing." in page
    assert "No limit is published for gateways: that takes fresh requests" in page
    assert 'href="#limits"' not in sweep.read("report.html").decode()
    assert "peaks at 60,500 tok/s at 700, but is no faster than at 500 (60,131 tok/s)." in page
    assert "they are unknown, not zero" in page
    assert "A closed loop keeps" not in page


def test_steps_without_limits(tmp_path: Path) -> None:
    sweep = SweepDir(FolderStore(tmp_path), "in")
    sweep.write_json("sweep.json", {"model": "llama", "source": "measured"})
    build_model_report(sweep)
    build_fleet_report({"llama": sweep}, SweepDir(FolderStore(tmp_path)), {"run_id": "r"})
    assert "No limit was computed for this sweep." in plain(sweep.read("report.html").decode())
    assert "No limit was computed in this run." in plain((tmp_path / "report.html").read_text())


def test_imports_that_say_little(tmp_path: Path) -> None:
    sweep = SweepDir(FolderStore(tmp_path), "in")
    sweep.write_json("sweep.json", {"model": "imported", "source": "imported", "files": {"a": "x", "b": "y"}})
    rows = [
        {"model": "m1", "series": "m1", "concurrency": 8, "attempted": 90, "completed": 90},
        {"model": "m2", "series": "m2", "workload": "rate 4", "attempted": 90, "completed": 80},
        {"model": "m3", "series": "m3", "concurrency": 4, "invalid": "one wave"},
    ]
    sweep.write_steps(pd.DataFrame(rows))
    build_fleet_report({"imported": sweep}, SweepDir(FolderStore(tmp_path)), {"run_id": "r"})
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("# Imported results: 2 files\n")
    assert "imported from a and b (x and y). They were not measured here" in page
    assert "of 3 steps of several models, 2 may be used. No traffic was measured at two concurrencies" in page
    assert "all traffic · m1\n\n- One concurrency alone says nothing about others." in page
    assert "all traffic · m2\n\n- Requests were sent at a rate; how many were in flight is not known." in page
    assert "all traffic · m3\n\n- No step may be used." in page
    assert "## Limits" not in page
    assert "Serving capacity" not in page


def test_repeats_are_pooled_with_a_t_interval() -> None:
    rows = [
        {
            "model": "m",
            "service_class": "batch",
            "phase": "grid",
            "concurrency": 8,
            "repeat": repeat,
            "attempted": 100,
            "completed": 99,
            "n_effective": 100.0,
            "total_tok_per_s": x,
        }
        for repeat, x in enumerate((10.0, 20.0, 30.0), 1)
    ]
    row = curve_of(judged_steps(pd.DataFrame(rows), None)).loc[8]
    assert (row["attempted"], row["completed"], row["total_tok_per_s"]) == (300, 297, 20.0)
    assert row["total_tok_per_s_high"] == pytest.approx(20 + 4.302653 * 10 / 3**0.5)
    exact = stats.binomtest(297, 300).proportion_ci(0.9, method="exact")
    assert (row["y_lower"], row["y_upper"]) == (pytest.approx(exact.low), pytest.approx(exact.high))


def test_bounds_are_clopper_pearson() -> None:
    assert binomial_bounds(600, 600) == (pytest.approx(0.05 ** (1 / 600)), 1.0)
    assert binomial_bounds(0, 20) == (0.0, pytest.approx(1 - 0.05 ** (1 / 20)))
    assert all(bound != bound for bound in binomial_bounds(0, 0))


def test_broken_sweeps_are_named(tmp_path: Path) -> None:
    sweep = SweepDir(FolderStore(tmp_path))
    sweep.write_json("sweep.json", {})
    with pytest.raises(DataError, match=r"sweep\.json: key 'model' is missing"):
        build_model_report(sweep)
    sweep.write_json("sweep.json", {"model": "m"})
    sweep.write("steps.csv", "a,b\n1,2\n")
    with pytest.raises(DataError, match=r"steps\.csv: columns \['model', 'concurrency'\] are missing"):
        build_model_report(sweep)


# -- numbers


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, "100 %"),
        (0.9996, "99.96 %"),
        (0.99, "99 %"),
        (0.0714, "7.1 %"),
        (0.0004, "0.04 %"),
        (0.0, "0 %"),
        (0.9999999, "> 99.999 %"),
        (None, "–"),
        (float("nan"), "–"),
    ],
)
def test_percent_never_rounds_to_all_or_nothing(value: float | None, expected: str) -> None:
    assert percent(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (212.4, "212 s"),
        (60.0, "60 s"),
        (12.34, "12.3 s"),
        (1.0, "1.0 s"),
        (0.62, "0.62 s"),
        (0.0231, "23 ms"),
        (0.0008, "0.8 ms"),
        (None, "–"),
    ],
)
def test_seconds(value: float | None, expected: str) -> None:
    assert seconds(value) == expected
