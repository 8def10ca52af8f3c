"""What comes from files, forms and names gets an error and does nothing: no crash, no file, no command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from include.capacity.config import DEFAULT_FLEET, Fleet, load_fleet, parse_fleet
from include.capacity.errors import CapacityError, ConfigError
from include.capacity.flow.imports import ImportRun
from include.capacity.flow.params import SweepParams, apply, parse_params
from include.capacity.flow.reaping import reap
from include.capacity.flow.tasks import run_key
from include.capacity.results.store import FolderStore, safe_name
from include.capacity.servers.lease import Lease

FLEET = load_fleet(DEFAULT_FLEET)
SHIPPED = DEFAULT_FLEET.read_text()

NASTY = [
    "../../etc/passwd",
    "..",
    "/etc/passwd",
    "<script>alert(1)</script>",
    "$(touch /tmp/x)",
    "`id`; rm -rf / | tee > x",
    "a\0b",
    "a\x1b[31mb",
    "{{ 7 * 7 }}",
    "${jndi:ldap://x}",
    "%s%n",
    "x" * 100_000,
    "\u202eevil",
    "NaN",
    "1e999",
    "9" * 5000,
    "-1",
    "' OR 1=1 --",
]


# -- YAML


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: !!python/object/apply:os.system ['touch x']", "tags (tag:yaml.org,2002:python"),
        ("a: !!binary aGk=", "tags (tag:yaml.org,2002:binary) are not allowed"),
        ("a: !own {b: 1}", "tags (!own) are not allowed"),
        ("a: &x [*x]", "aliases"),
        ("a: &x [1, 2]\nb: [*x, *x]", "aliases"),
        ("[" * 20_000, "nested too deeply"),
        ("{a: " * 20_000, "nested too deeply"),
        ("a: " + "9" * 5000, "not valid YAML: Exceeds the limit"),
        ("a: b\0c", "not valid YAML"),
        ('a: "b\\0c"', "a: holds the control character"),
        ('a: {b: ["\\e[31m"]}', "a.b: holds the control character"),
        ("a: 1\na: 2", "given twice"),
        ("? [a, b]\n: 1", "keys must be plain"),
    ],
)
def test_yaml_that_is_a_trap(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fleet(text, "fleet.yaml")
    assert says in str(caught.value)
    assert str(caught.value).startswith("fleet.yaml: ")


def test_what_looks_like_a_date_is_text() -> None:
    with pytest.raises(ConfigError, match="publish: Field required"):  # and no crash over the month
        parse_fleet("fleet: 2001-99-99", "fleet.yaml")


def test_the_key_on_is_a_word() -> None:
    """Of ``notify``; for YAML 1.1 it would be a truth value."""
    entry = "notify:\n  - notifier: a.B\n    on: [run_failed, limit_fell]"
    (found,) = parse_fleet(SHIPPED.replace("notify: []", entry), "fleet.yaml").notify
    assert found.on == ["run_failed", "limit_fell"]
    for value, told in {"yes": True, "on": True, "true": True, "no": False, "off": False}.items():
        text = SHIPPED.replace("ignore_eos: true", f"ignore_eos: {value}")
        assert parse_fleet(text, "x").classes["interactive"].workload.ignore_eos is told


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf", "1e400", "-1", "1" + "0" * 400])
@pytest.mark.parametrize(
    "field",
    [
        "max_lateness_s: 7200",
        "pause_after_refusal_s: 1.0",
        "completion_floor: 0.99 ",
        "budget_s: 21600",
        "deadline_s: 60 ",
    ],
)
def test_numbers_that_are_none(field: str, number: str) -> None:
    assert field in SHIPPED
    name = field.partition(":")[0]
    with pytest.raises(ConfigError, match=name):
        parse_fleet(SHIPPED.replace(field, f"{name}: {number} "), "fleet.yaml")


@pytest.mark.parametrize("value", [".nan", ".inf", "[1, {b: .nan}]"])
def test_a_request_body_that_is_no_json(value: str) -> None:
    with pytest.raises(ConfigError, match=r"extra_body: expected values of JSON"):
        parse_fleet(SHIPPED.replace("extra_body: {}", f"extra_body: {{a: {value}}}"), "fleet.yaml")


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.text(max_size=200), st.sampled_from(NASTY)))
def test_any_text_is_a_fleet_or_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_fleet(text, "fleet.yaml")


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.sampled_from(NASTY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(
    key=st.sampled_from(
        ["fleet", "night", "publish", "accelerators", "steps", "classes", "models", "<b>", "../x"]
    ),
    value=JSONS,
)
def test_any_value_in_a_fleet_is_taken_or_an_error_that_names_the_file(key: str, value: object) -> None:
    data = {**yaml.safe_load(SHIPPED), key: value}
    try:
        text = yaml.safe_dump(data)
    except yaml.YAMLError:
        return
    try:
        taken = parse_fleet(text, "fleet.yaml")
    except ConfigError as error:
        told = str(error)
    else:
        told = "fleet.yaml" if isinstance(taken, Fleet) else ""
    assert "fleet.yaml" in told


# -- parameters of the forms


@settings(max_examples=150, deadline=None)
@given(
    conf=st.dictionaries(
        st.sampled_from(
            [
                *("models", "classes", "mode", "concurrency", "repeats", "requests_per_step"),
                *("seconds_per_step", "deadline_s", "ttft_objective_s", "completion_floor"),
                *("publish_to", "promote", "__class__"),
            ]
        ),
        JSONS,
        max_size=4,
    )
)
def test_any_parameter_is_taken_or_an_error(conf: dict[str, object]) -> None:
    try:
        changed = apply(parse_params(SweepParams, conf), FLEET)
    except ConfigError:
        return
    json.dumps(changed.model_dump(mode="json"), allow_nan=False)


@pytest.mark.parametrize("value", NASTY)
@pytest.mark.parametrize("field", ["models", "classes", "mode", "concurrency", "publish_to", "deadline_s"])
def test_a_nasty_parameter_is_refused(field: str, value: str) -> None:
    given_value = [value] if field in ("models", "classes") else value
    with pytest.raises(ConfigError, match="params"):
        apply(parse_params(SweepParams, {field: given_value}), FLEET)


@pytest.mark.parametrize("value", NASTY)
def test_a_nasty_import_is_refused_before_anything_is_read(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPACITY_FLEET", str(DEFAULT_FLEET))
    for params in ({"path": value}, {"path": "file:///x", "publish_to": value}, {value: "x"}):
        with pytest.raises(ConfigError, match="params"):
            ImportRun.of(run_id="r", dag_id="d", params=params)
    with pytest.raises(ConfigError, match="params"):
        reap({"dry_run": value}, lambda run: True)


# -- names that become files, keys, task groups


@settings(max_examples=300)
@given(text=st.one_of(st.text(max_size=300), st.sampled_from(NASTY)))
def test_a_name_is_one_segment_whatever_it_is(text: str) -> None:
    for name in (safe_name(text), run_key("capacity_sweep", text), run_key(text, "manual__1")):
        assert name not in ("", ".", "..")
        assert not set(name) & set("/\\\0\n<>&'\"`$;| ")
        assert len(name.encode()) <= 255


@settings(max_examples=100)
@given(one=st.text(max_size=50), other=st.text(max_size=50))
def test_two_names_are_two_segments(one: str, other: str) -> None:
    assert (safe_name(one) == safe_name(other)) == (one == other)


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd", "a/../../../x"])
def test_a_key_cannot_lead_out_of_a_store(tmp_path: Path, key: str) -> None:
    store = FolderStore(tmp_path / "store")
    for act in (store.read, store.exists, lambda name: store.write(name, b"x")):
        with pytest.raises(CapacityError, match="leads out of"):
            act(key)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in NASTY if len(name) < 1000])
def test_a_lease_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    assert Lease(name, holder=name, model=name, folder=tmp_path / "leases").acquire()
    assert [path.name for path in tmp_path.iterdir()] == ["leases"]
    assert all(path.parent == tmp_path / "leases" for path in tmp_path.rglob("*.*"))
