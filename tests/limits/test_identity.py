from include.capacity.config import Accelerator
from include.capacity.limits.identity import comparison_id, stack_id
from tests.limits.virtual import service_class

CARD = Accelerator(kind="H100-SXM-80GB", count=2)


def test_a_stack_is_named_by_what_is_in_it_and_not_by_its_order():
    assert stack_id({"vllm": "0.32", "args": ["-tp", "2"]}) == stack_id(
        {"args": ["-tp", "2"], "vllm": "0.32"}
    )
    assert stack_id({"vllm": "0.32"}) != stack_id({"vllm": "0.33"})
    assert len(stack_id({})) == 12


def test_what_may_be_compared():
    same = comparison_id("m", "interactive", service_class(), CARD)
    assert same == comparison_id("m", "interactive", service_class(completion_floor=0.999), CARD)
    budget = Accelerator(kind="H100-SXM-80GB", count=2, budget_s=60)
    assert same == comparison_id("m", "interactive", service_class(), budget)
    other_lengths = service_class(
        workload={
            "name": "chat",
            "prompt_tokens": {"median": 513, "sigma": 0.6},
            "output_tokens": {"median": 200, "sigma": 0.6},
        }
    )
    different = {
        comparison_id("n", "interactive", service_class(), CARD),
        comparison_id("m", "chat", service_class(), CARD),
        comparison_id("m", "interactive", other_lengths, CARD),
        comparison_id("m", "interactive", service_class(), Accelerator(kind="H100-SXM-80GB", count=4)),
        comparison_id("m", "interactive", service_class(), Accelerator(kind="H200", count=2)),
    }
    assert len(different | {same}) == 6


def test_what_differs_from_start_to_start_is_no_part_of_the_stack() -> None:
    assert stack_id({"a": 1, "observed": {"kv_cache_tokens": 5}}) == stack_id({"a": 1})
