"""Profiles are read strictly and named in errors; the engine's hash covers the mechanism only."""

from __future__ import annotations

from pathlib import Path

import pytest

from include.capacity.errors import ConfigError
from include.capacity.simulator.profile import load_profile
from tests.simulator.profiles import tiny

TEXT = "model: m\nengine: {max_num_seqs: 2, kv_cache_tokens: 20000, iteration: {base_s: 0.01}}\n"


def test_a_file_is_named_by_its_stem(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(TEXT)
    profile = load_profile(file)
    assert (profile.name, profile.engine.max_num_seqs, profile.time_scale) == ("mine", 2, 1.0)
    assert profile.engine.max_num_queued_reqs is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TEXT + "colour: red\n", "colour: Extra inputs are not permitted, found 'red'"),
        (TEXT.replace("0.01", "-1"), "engine.iteration.base_s: Input should be greater than 0, found -1"),
        (TEXT.replace("20000", "100"), "kv_cache_tokens 100 is below max_model_len 16384"),
        ("- a\n", "expected a mapping at the top, found list"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_profile(file)
    assert str(file) in str(caught.value)
    assert told in str(caught.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no-such.*'sprinter', 'steady'"):
        load_profile("no-such")


def test_the_hash_is_of_the_mechanism() -> None:
    profile = tiny()
    assert tiny(time_scale=7, stream_interval=3).engine_hash == profile.engine_hash
    assert tiny(max_num_seqs=3).engine_hash != profile.engine_hash
    assert tiny(seed=1).engine_hash != profile.engine_hash
