"""The fleet file: what is read, what is refused, and how errors name the place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from include.capacity.config import DEFAULT_FLEET, Fleet, load_fleet, parse_fleet
from include.capacity.errors import ConfigError

TEXT = DEFAULT_FLEET.read_text(encoding="utf-8")


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_fleet(text, "fleet.yaml")
    return str(caught.value)


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new)


def test_shipped_fleet_writes_out_the_methods_defaults() -> None:
    fleet = load_fleet()
    interactive, batch = fleet.classes["interactive"], fleet.classes["batch"]
    assert (interactive.deadline_s, interactive.completion_floor) == (60, 0.99)
    assert interactive.ttft is not None
    assert (interactive.ttft.at_most_s, interactive.ttft.share) == (1.0, 0.95)
    assert (batch.deadline_s, batch.completion_floor, batch.ttft) == (120, 0.95, None)
    lengths = interactive.workload.output_tokens
    assert (lengths.median, lengths.sigma, lengths.at_least, lengths.at_most) == (200, 0.6, 16, 1024)
    assert interactive.ladder == [1, 4, 8, 16, 32, 64, 128, 256, 512]
    assert batch.ladder == [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert (fleet.steps.prove_requests, fleet.steps.prove_requests_max) == (600, 3000)


def test_model_inherits_classes_and_changes_parts() -> None:
    fleet = load_fleet()
    batch = fleet.models["steady"].classes["batch"]
    assert batch.deadline_s == 15
    assert batch.completion_floor == 0.95  # inherited
    assert fleet.classes["batch"].deadline_s == 120  # the fleet's own stays


def test_null_leaves_a_class_out() -> None:
    line = "      batch: {deadline_s: 15, ladder: [16, 64, 128, 192]}"
    fleet = parse_fleet(changed(line, "      batch: null"), "fleet.yaml")
    assert list(fleet.models["steady"].classes) == ["interactive"]
    assert list(fleet.models["sprinter"].classes) == ["interactive", "batch"]


def test_every_problem_is_named_with_file_key_and_value() -> None:
    text = changed("profile: steady", "profle: steady").replace("deadline_s: 60 ", "deadline_s: soon ")
    message = refused(text)
    assert "fleet.yaml: models.steady.server.profile: Field required" in message
    assert (
        "fleet.yaml: models.steady.server.profle: Extra inputs are not permitted, found 'steady'" in message
    )
    assert "fleet.yaml: classes.interactive.deadline_s: Input should be a valid number" in message
    assert "found 'soon'" in message


def test_unknown_accelerator_is_named() -> None:
    text = changed(
        "    accelerator: sim-0\n    classes:\n      interactive: {ladder: [8, 16, 32, 48]}",
        "    accelerator: gpu-9\n    classes:\n      interactive: {ladder: [8, 16, 32, 48]}",
    )
    assert "models.steady.accelerator: 'gpu-9' is none of ['sim-0']" in refused(text)


def test_unknown_class_of_a_model_is_named() -> None:
    text = changed(
        "      batch: {deadline_s: 15, ladder: [16, 64, 128, 192]}", "      bulk: {deadline_s: 15}"
    )
    assert "models.steady.classes: ['bulk'] are none of ['batch', 'interactive']" in refused(text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("fleet: demo", "fleet: demo\nfleet: other", "key 'fleet' is given twice"),
        ("fleet: demo", "fleet: !!python/object/apply:os.system [id]", "not valid YAML"),
        ("fleet: demo", "fleet: &x demo\nmodels: *x", "aliases"),
        ("fleet: demo", "fleet: ../../etc", "fleet: String should match pattern"),
        ("ladder: [8, 16, 32, 48]", "ladder: [16, 8]", "expected concurrencies in ascending order"),
        ("ladder: [8, 16, 32, 48]", "ladder: [0, 8]", "greater than or equal to 1"),
        ("ladder: [8, 16, 32, 48]", "ladder: [8, 999999999999]", "less than or equal to 100000"),
        ("ladder: [8, 16, 32, 48]", "ladder: []", "at least 1 item"),
        ('schedule: "0 1 * * *"', 'schedule: "at night"', "expected a cron expression such as 0 1 * * *"),
        ("timezone: UTC", "timezone: Mars/Base", "expected a time zone such as Europe/Berlin"),
        ("to: s3://capacity/demo", "to: http://x/y", "publish.to: String should match pattern"),
        ("at_most_s: 1.0", "at_most_s: 61", "objective of 61.0 s is beyond the deadline of 60.0 s"),
        ("completion_floor: 0.99", "completion_floor: 1.5", "less than 1"),
        ("completion_floor: 0.99", "completion_floor: .nan", "completion_floor"),
        ("    ttft: {at_most_s: 1.0, share: 0.95}\n", "", "an interactive class needs a ttft objective"),
        ('schedule: "0 1 * * *"', 'schedule: "0 1 * * *"\n  schedul: x', "night.schedul: Extra inputs"),
    ],
)
def test_wrong_files_are_refused(old: str, new: str, said: str) -> None:
    assert said in refused(changed(old, new))


def test_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_fleet(tmp_path / "nowhere.yaml")


def test_a_list_is_no_fleet() -> None:
    assert "expected a mapping at the top, found list" in refused("- 1\n")


def test_environment_names_another_file(tmp_path, monkeypatch) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(changed("fleet: demo", "fleet: other"))
    monkeypatch.setenv("CAPACITY_FLEET", str(file))
    assert load_fleet().fleet == "other"


def test_fleet_survives_its_own_json() -> None:
    fleet = load_fleet()
    assert Fleet.model_validate(fleet.model_dump(mode="json")) == fleet


def test_recipes_for_eight_mi325x_serve_each_model_as_its_attention_needs() -> None:
    fleet = load_fleet(DEFAULT_FLEET.with_name("fleet.mi325x.yaml"))
    args = {name: dict(a.split("=", 1) for a in m.vllm_args if "=" in a) for name, m in fleet.models.items()}
    cards = {name: found["--tensor-parallel-size"] for name, found in args.items()}
    assert cards == {"qwen3-vl-235b": "8", "llama-405b": "8", "deepseek-v3.2": "8", "kimi-k2.5": "4"}
    assert {name for name, found in args.items() if found.get("--block-size") == "1"} == {
        "deepseek-v3.2",
        "kimi-k2.5",
    }
    assert not any("offload" in name for found in args.values() for name in found)
    assert {model.server.kind for model in fleet.models.values()} == {"process"}
    assert {model.accelerator for model in fleet.models.values()} == {"mi325x-0"}  # never side by side
    assert all(int(a["--max-num-seqs"]) >= fleet.classes["batch"].ladder[-1] for a in args.values())


def test_names_that_files_and_task_groups_cannot_tell_apart_are_refused() -> None:
    text = changed("  sprinter: ", "  STEADY: ")
    assert "models: 'steady' and 'STEADY' differ only in case or punctuation" in refused(text)


@pytest.mark.parametrize("url", ["10.0.0.7:8000", "http://", "http://a b", "http://h:99999", "ftp://h"])
def test_an_endpoint_needs_a_url(url: str) -> None:
    text = changed("{kind: simulator, profile: steady}", f'{{kind: endpoint, url: "{url}"}}')
    assert "models.steady.server.url: expected http://host:port or https://host" in refused(text)


def test_a_model_cannot_be_named_like_a_task_of_the_run() -> None:
    text = changed("\n  steady: ", "\n  publish: ")
    assert "models: 'publish' is the name of a task of the whole run" in refused(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"notify": [{"notifier": "a.B", "on": ["limit_sank"]}]}, r"notify\.0\.on\.0: .*'limit_fell'"),
        ({"notify": [{"notifier": "a.B", "on": []}]}, r"notify\.0\.on: "),
        ({"notify": [{"notifier": "B", "on": ["run_failed"]}]}, r"notify\.0\.notifier: "),
        (
            {"notify": [{"notifier": "a.B", "on": ["run_failed"], "arguments": {"api_token": "x"}}]},
            r"notify\.0: arguments\.api_token: a secret belongs into an Airflow connection",
        ),
        (
            {"publish": {"to": "s3://b/p", "sse": "AES256", "sse_kms_key_id": "k"}},
            r"publish: sse_kms_key_id needs sse: aws:kms",
        ),
        ({"publish": {"to": "s3://b/p", "sse": "rot13"}}, r"publish\.sse: "),
    ],
)
def test_notifications_and_encryption_are_checked(change: dict[str, Any], message: str) -> None:
    data = {**yaml.safe_load(DEFAULT_FLEET.read_text()), **change}
    with pytest.raises(ConfigError, match=message):
        parse_fleet(yaml.safe_dump(data), "fleet.yaml")


def test_the_examples_of_the_readme_are_read_as_they_stand() -> None:
    """Literally: what a library has dumped is quoted where people do not quote."""
    blocks = re.findall(r"```yaml\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.S)
    shipped = DEFAULT_FLEET.read_text()
    places = {
        "notify:\n": "notify: []\n",
        "    server:": "    server: {kind: simulator, profile: steady}\n",
        "accelerators:\n": "accelerators:\n",
        "models:\n": "models:\n",
    }
    kinds = set()
    for block in blocks:
        place = next(text for start, text in places.items() if block.startswith(start))
        text = block.replace("models:\n", "", 1) if place == "models:\n" else block
        if place == "accelerators:\n":
            head, text = block.split("models:\n")
            fleet = shipped.replace(place, head, 1).replace("models:\n", f"models:\n{text}", 1)
        elif place == "models:\n":
            fleet = shipped.replace(place, f"models:\n{text.replace('h100-0', 'sim-0')}", 1)
        else:
            fleet = shipped.replace(place, text, 1)
        found = parse_fleet(fleet, "README.md")
        kinds |= {model.server.kind for model in found.models.values()} | {
            item.on[0] for item in found.notify
        }
    assert kinds == {"simulator", "process", "endpoint", "docker", "kubernetes", "run_failed"}
