"""Which limits become files, with which numbers, and what a file says where there is none."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from include.capacity.config import Gateway, validate
from include.capacity.errors import ConfigError
from include.capacity.policy import FORMATS, policy_files
from include.capacity.results.store import safe_name
from tests.policy.made import about, entry, limits, pair

FILES = {
    "litellm": "litellm.yaml",
    "envoy-gateway": "envoy-gateway.yaml",
    "envoy": "envoy.yaml",
    "nginx": "nginx.conf",
    "vllm": "vllm.yaml",
}

NASTY = st.text(min_size=1, max_size=40) | st.text(
    alphabet="\"'\n\r\t{};$#%:\\ \u2028\x00\x85a-*&!|>", min_size=1
)


def texts(*entries: dict[str, Any], gateway: Gateway | None = None, **more: Any) -> dict[str, str]:
    return {
        name.removeprefix("policy/"): data.decode()
        for name, data in policy_files(about(**more), limits(*entries), gateway).items()
    }


def cluster(text: str, at: int = 0) -> dict[str, Any]:
    return yaml.safe_load(text)["static_resources"]["clusters"][at]


def numbers(files: dict[str, str], folder: str) -> dict[str, Any]:
    """The limit of the first class in each format of a folder, by a parser where there is one."""
    found: dict[str, Any] = {}
    for name, file in FILES.items():
        text = files.get(f"{folder}/{file}")
        if text is None:
            continue
        if name == "nginx":
            found[name] = [int(n) for n in re.findall(r"^ +limit_conn \S+ (\d+);$", text, re.M)]
        elif name == "envoy":
            clusters = yaml.safe_load(text)["static_resources"]["clusters"]
            found[name] = [one["circuit_breakers"]["thresholds"][0]["max_requests"] for one in clusters]
        elif name == "envoy-gateway":
            found[name] = [
                one["spec"]["circuitBreaker"]["maxParallelRequests"] for one in yaml.safe_load_all(text)
            ]
        elif name == "litellm":
            found[name] = [
                one["litellm_params"]["max_parallel_requests"] for one in yaml.safe_load(text)["model_list"]
            ]
        else:
            found[name] = yaml.safe_load(text)
    return found


def test_each_format_carries_the_limit() -> None:
    files = texts(entry("interactive", 25), entry("batch", 107, status="lower_bound"))

    assert numbers(files, "alone/interactive") == {
        "litellm": [25],
        "envoy-gateway": [25],
        "envoy": [25],
        "nginx": [25],
        "vllm": {"max-num-queued-reqs": 25},
    }
    assert numbers(files, "alone/batch")["envoy"] == [107]
    for text in (files["alone/batch/nginx.conf"], files["alone/batch/litellm.yaml"]):
        assert "lower_bound" in text
        assert "valid until 2026-12-03T05:00:00+00:00" in text


def test_several_gateways_divide_it_each_as_it_counts() -> None:
    gateway = Gateway(replicas=3, processes=4)

    files = texts(entry("interactive", 25), gateway=gateway)

    assert numbers(files, "alone/interactive") == {
        "litellm": [2],  # 25 // (3 x 4)
        "envoy-gateway": [8],  # 25 // 3
        "envoy": [8],
        "nginx": [8],
        "vllm": {"max-num-queued-reqs": 25},  # it sees them all
    }


def test_a_limit_that_cannot_be_divided_is_not_rounded_up() -> None:
    files = texts(entry("interactive", 5), gateway=Gateway(replicas=2, processes=3))

    found = numbers(files, "alone/interactive")
    assert "litellm" not in found
    assert found["nginx"] == [2]
    assert files["alone/interactive/NO-LIMIT.txt"] == (
        "litellm: interactive: a limit of 5 cannot be divided among 6 LiteLLM processes; use fewer of them, "
        "or let one gateway stand before this server\n"
    )
    (policy,) = json.loads(files["index.json"])["policies"]
    assert sorted(policy["files"]) == ["envoy", "envoy-gateway", "nginx", "vllm"]
    assert sorted(policy["why_not"]) == ["litellm"]


def test_deadline_and_retries_are_carried() -> None:
    files = texts(entry("interactive", 25), entry("batch", 107))

    chat, batch = (
        yaml.safe_load(files[f"alone/{name}/envoy.yaml"])["static_resources"]["listeners"][0][
            "filter_chains"
        ][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"][0]["routes"][-1]["route"]
        for name in ("interactive", "batch")
    )
    assert (chat["timeout"], "retry_policy" in chat) == ("60.000s", False)
    assert batch["timeout"] == "15.000s"
    assert batch["retry_policy"]["num_retries"] == 2
    assert batch["retry_policy"]["retry_back_off"] == {"base_interval": "1.000s", "max_interval": "10.000s"}

    chat, batch = (
        yaml.safe_load(files[f"alone/{name}/envoy-gateway.yaml"])["spec"] for name in ("interactive", "batch")
    )
    assert (chat["timeout"], "retry" in chat) == ({"http": {"requestTimeout": "1m"}}, False)
    assert batch["timeout"] == {"http": {"requestTimeout": "15s"}}
    assert batch["retry"]["numRetries"] == 2
    assert batch["retry"]["perRetry"] == {"backOff": {"baseInterval": "1s", "maxInterval": "10s"}}

    chat, batch = (yaml.safe_load(files[f"alone/{name}/litellm.yaml"]) for name in ("interactive", "batch"))
    (params,) = (one["litellm_params"] for one in chat["model_list"])
    assert (params["timeout"], params["stream_timeout"], params["num_retries"]) == (60.0, 60.0, 0)
    (params,) = (one["litellm_params"] for one in batch["model_list"])
    assert (params["timeout"], params["num_retries"]) == (15.0, 2)
    assert batch["router_settings"]["retry_after"] == 1

    assert "proxy_read_timeout 60s;" in files["alone/interactive/nginx.conf"]
    assert "proxy_read_timeout 15s;" in files["alone/batch/nginx.conf"]
    assert "proxy_next_upstream off;" in files["alone/batch/nginx.conf"]


def test_a_shorter_deadline_that_limits_were_judged_by_is_the_one_exported() -> None:
    files = texts(entry("interactive", 25, deadline_s=1.5))

    assert "proxy_read_timeout 1500ms;" in files["alone/interactive/nginx.conf"]
    document = yaml.safe_load(files["alone/interactive/envoy-gateway.yaml"])
    assert document["spec"]["timeout"] == {"http": {"requestTimeout": "1s500ms"}}


def test_fallbacks_and_addresses_come_from_the_fleet_file() -> None:
    gateway = Gateway(fallbacks=["small"], upstream="http://vllm-0.models:9000", listen="127.0.0.1:8088")

    files = texts(entry("interactive", 25), gateway=gateway)

    proxy = yaml.safe_load(files["alone/interactive/litellm.yaml"])
    assert proxy["router_settings"]["fallbacks"] == [{"sim/steady-8b": ["small"]}]
    assert proxy["model_list"][0]["litellm_params"]["api_base"] == "http://vllm-0.models:9000/v1"
    assert "server vllm-0.models:9000 max_fails=0;" in files["alone/interactive/nginx.conf"]
    assert "listen 127.0.0.1:8088;" in files["alone/interactive/nginx.conf"]
    endpoint = cluster(files["alone/interactive/envoy.yaml"])["load_assignment"]["endpoints"][0]
    assert endpoint["lb_endpoints"][0]["endpoint"]["address"] == {
        "socket_address": {"address": "vllm-0.models", "port_value": 9000}
    }


@pytest.mark.parametrize(
    "upstream", ["https://a:1", "http://a:1/v1", "http://u:p@a:1", "http://a;b:1", "http://[::1]:80", "a:1"]
)
def test_an_upstream_that_a_file_could_not_carry_is_refused(upstream: str) -> None:
    with pytest.raises(ConfigError, match="upstream: expected"):
        validate(Gateway, {"upstream": upstream}, "fleet")


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:65536", "999.0.0.1:80", "127.0.0.1", "1.2.3:80", "[::]:80", "h:80"]
)
def test_an_address_that_no_gateway_could_listen_at_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="listen: "):
        validate(Gateway, {"listen": listen}, "fleet")


def test_a_deadline_below_a_millisecond_is_not_none() -> None:
    text = texts(entry("interactive", 25, deadline_s=0.0001))["alone/interactive/envoy.yaml"]
    assert 'timeout: "0.001s"' in text
    assert "0.000s" not in text


def test_the_gateway_in_sweep_json_counts() -> None:
    files = {
        name.removeprefix("policy/"): data.decode()
        for name, data in policy_files(
            about(gateway={"replicas": 5}), limits(entry("interactive", 25))
        ).items()
    }

    assert numbers(files, "alone/interactive")["nginx"] == [5]


# -- what is not exported


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (entry("interactive", None), "no step of proof size passed"),
        (entry("interactive", 25, status="rejected", reason="it drifted"), "it drifted"),
        (entry("interactive", 25, source="imported"), "imported, not measured by us"),
        (entry("a; }", 25), "'a; }' is no name of a class"),
        (
            entry("interactive", 25, deadline_s=None),
            "interactive has no deadline, and a limit means nothing without one",
        ),
        (entry("chat", 25), "sweep.json does not say what class chat was measured with"),
    ],
)
def test_no_number_without_proof(one: dict[str, Any], reason: str) -> None:
    files = texts(one)

    name = one["class"]
    place = safe_name(name)
    assert sorted(files) == [f"alone/{place}/NO-LIMIT.txt", "index.json"]
    assert files[f"alone/{place}/NO-LIMIT.txt"] == f"There is no limit here for a gateway to use.\n{reason}\n"
    (policy,) = json.loads(files["index.json"])["policies"]
    assert policy["classes"] == {name: None}
    assert policy["why_not"] == dict.fromkeys(FORMATS, reason)


def test_two_classes_on_one_server_only_from_a_pair() -> None:
    alone = entry("interactive", 25), entry("batch", 107)

    files = texts(*alone)
    assert [name for name in files if name.startswith("shared/")] == ["shared/NO-LIMIT.txt"]
    assert "do not add up" in files["shared/NO-LIMIT.txt"]

    files = texts(*alone, *pair(12, 50))
    assert numbers(files, "shared") == {
        "litellm": [12, 50],
        "envoy-gateway": [12, 50],
        "envoy": [12, 50],
        "nginx": [12, 50],
        "vllm": {"max-num-queued-reqs": 62},
    }
    assert numbers(files, "alone/batch")["nginx"] == [107]


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([pair(12, 50)[0]], "interactive was proven beside {'batch': 50}, not beside {}"),
        ([pair(12, 50)[0], pair(12, 60)[1]], "interactive was proven beside {'batch': 50}, not beside"),
        (
            [pair(12, 50)[0], entry("batch", None, measured="shared", reason="no pair was proven together")],
            "interactive was proven beside {'batch': 50}, not beside {'batch': None}",
        ),
        (
            [
                entry(name, None, measured="shared", reason="no pair held")
                for name in ("interactive", "batch")
            ],
            "no pair held",
        ),
    ],
)
def test_half_a_pair_is_no_pair(entries: list[dict[str, Any]], reason: str) -> None:
    files = texts(entry("interactive", 25), entry("batch", 107), *entries)

    assert numbers(files, "shared") == {}
    assert reason in files["shared/NO-LIMIT.txt"]


def test_an_older_vllm_has_no_such_flag() -> None:
    files = texts(entry("interactive", 25), stack={"vllm_version": "0.28.1"})

    assert "alone/interactive/vllm.yaml" not in files
    assert (
        "vllm: vLLM 0.28.1 has no --max-num-queued-reqs; it came with 0.29"
        in (files["alone/interactive/NO-LIMIT.txt"])
    )
    for known in ("0.29.0", "1.0", None):
        assert "alone/interactive/vllm.yaml" in texts(entry("interactive", 25), stack={"vllm_version": known})


# -- names


@settings(deadline=None, max_examples=25)
@example("a\nmax-num-queued-reqs: 999")
@example("x}\nserver { listen 1; }")
@example("${HOME} $host %{q} {{ .Values }}")
@given(NASTY)
def test_names_change_no_meaning(name: str) -> None:
    """Whatever a model is called: the data are the plain name's, but for the name itself."""
    nasty = texts(entry("interactive", 25), model=name, served_name=name, run_id=name)
    plain = texts(entry("interactive", 25), model="plain", served_name="plain", run_id="plain")
    safe_to_litellm = "*" not in name and not name.startswith("os.environ/")

    assert numbers(nasty, "alone/interactive") == {
        key: value
        for key, value in numbers(plain, "alone/interactive").items()
        if key != "litellm" or safe_to_litellm
    }
    if safe_to_litellm:
        (one,) = yaml.safe_load(nasty["alone/interactive/litellm.yaml"])["model_list"]
        assert one["model_name"] == name
        assert one["litellm_params"]["model"] == f"hosted_vllm/{name}"
    annotations = yaml.safe_load(nasty["alone/interactive/envoy-gateway.yaml"])["metadata"]["annotations"]
    assert annotations["capacity/model"] == name
    for file in ("nginx.conf", "envoy.yaml", "vllm.yaml"):
        assert statements(nasty[f"alone/interactive/{file}"]) == statements(
            plain[f"alone/interactive/{file}"]
        )


def statements(text: str) -> list[str]:
    """Lines that are no comment, without the identifiers that are made from names."""
    lines = [line for line in text.split("\n") if not line.startswith("#")]
    return [re.sub(r"[a-z0-9_-]*interactive[_-]alone[_-][0-9a-f]{8}", "ID", line) for line in lines]


@settings(deadline=None, max_examples=25)
@given(NASTY, NASTY)
def test_distinct_models_get_distinct_identifiers(one: str, other: str) -> None:
    names = set()
    for name in (one, other):
        document = yaml.safe_load(
            texts(entry("interactive", 25), model=name)["alone/interactive/envoy-gateway.yaml"]
        )
        names.add(document["metadata"]["name"])
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", document["metadata"]["name"])
    assert len(names) == len({one, other})


@pytest.mark.parametrize("name", ["gpt-*", "os.environ/SECRET"])
def test_names_that_litellm_reads_as_something_else_are_refused(name: str) -> None:
    files = texts(entry("interactive", 25), served_name=name)

    assert "alone/interactive/litellm.yaml" not in files
    assert "means something else to LiteLLM" in files["alone/interactive/NO-LIMIT.txt"]
