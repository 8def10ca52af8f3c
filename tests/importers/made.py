"""Made result files in the layouts of other tools; all numbers are invented."""

from __future__ import annotations

from typing import Any

VLLM: dict[str, Any] = {
    "date": "20260102-030405",
    "endpoint_type": "vllm",
    "backend": "vllm",
    "label": None,
    "model_id": "acme/tiny",
    "tokenizer_id": "acme/tiny",
    "num_prompts": 320,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": 32,
    "duration": 20.0,
    "completed": 320,
    "failed": 0,
    "total_input_tokens": 160_000,
    "total_output_tokens": 32_000,
    "request_throughput": 16.0,
    "request_goodput": None,
    "output_throughput": 1600.0,
    "total_token_throughput": 9600.0,
    "max_concurrent_requests": 48,
    "mean_ttft_ms": 20.0,
    "median_ttft_ms": 18.0,
    "std_ttft_ms": 3.0,
    "p99_ttft_ms": 40.0,
    "mean_tpot_ms": 20.0,
    "median_tpot_ms": 19.0,
    "p99_tpot_ms": 30.0,
    "mean_itl_ms": 20.0,
    "median_itl_ms": 19.0,
    "p99_itl_ms": 60.0,
}
"""In flight = 16/s x (0.020 + 99 x 0.020) s = 32."""


def distribution(mean: float, p50: float, p95: float, p99: float, count: int = 300) -> dict[str, Any]:
    """A statistic in guidellm's form, the same for all kinds but the successful."""
    kind = {"mean": mean, "count": count, "percentiles": {"p50": p50, "p95": p95, "p99": p99}}
    zero = {"mean": 0.0, "count": 0, "percentiles": {"p50": 0.0, "p95": 0.0, "p99": 0.0}}
    return {"successful": kind, "errored": zero, "incomplete": zero, "total": kind}


GUIDELLM_METRICS = {
    "requests_per_second": distribution(10.0, 11.0, 99.0, 999.0),
    "request_concurrency": distribution(7.9, 8.0, 8.0, 8.0),
    "request_latency": distribution(0.79, 0.78, 0.9, 1.0),
    "prompt_token_count": distribution(128.0, 128.0, 128.0, 128.0),
    "output_token_count": distribution(64.0, 64.0, 64.0, 64.0),
    "time_to_first_token_ms": distribution(30.0, 28.0, 50.0, 60.0),
    "time_per_output_token_ms": distribution(12.0, 12.0, 13.0, 14.0),
    "inter_token_latency_ms": distribution(12.1, 12.0, 13.0, 14.0),
    "output_tokens_per_second": distribution(640.0, 640.0, 640.0, 640.0),
    "tokens_per_second": distribution(1920.0, 1920.0, 1920.0, 1920.0),
}

GUIDELLM_OLD = {
    "benchmarks": [
        {
            "args": {"strategy": {"type_": "concurrent", "streams": 8}},
            "run_stats": {
                "start_time": 1_767_300_000.0,
                "end_time": 1_767_300_030.0,
                "requests_made": {"successful": 300, "errored": 4, "incomplete": 8, "total": 312},
            },
            "worker": {"backend_model": "acme/tiny"},
            "request_loader": {"data": "prompt_tokens=128,output_tokens=64"},
            "metrics": GUIDELLM_METRICS,
        }
    ]
}

GUIDELLM_NEW = {
    "metadata": {"version": 1, "guidellm_version": "0.5.0"},
    "args": {"model": "acme/tiny", "data": ["prompt_tokens=128,output_tokens=64"]},
    "benchmarks": [
        {
            "config": {"strategy": {"type_": "constant", "rate": 10.0}},
            "scheduler_metrics": {
                "measure_start_time": 1_767_300_000.0,
                "measure_end_time": 1_767_300_030.0,
                "requests_made": {"successful": 300, "errored": 4, "incomplete": 8, "total": 312},
            },
            "metrics": GUIDELLM_METRICS,
        }
    ],
}

AIPERF = {
    "request_throughput": {"unit": "requests/sec", "avg": 2.0},
    "request_latency": {"unit": "ms", "avg": 7900.0, "p50": 7800.0, "p95": 9000.0, "p99": 9900.0},
    "request_count": {"unit": "requests", "avg": 96.0},
    "time_to_first_token": {"unit": "ms", "avg": 230.0, "p50": 180.0, "p95": 600.0, "p99": 700.0},
    "inter_token_latency": {"unit": "us", "avg": 12_000.0, "p50": 12_000.0, "p95": 13_000.0, "p99": 13_500.0},
    "inter_chunk_latency": {"unit": "ms", "avg": 99.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 1080.0},
    "total_token_throughput": {"unit": "tokens/sec", "avg": 8600.0},
    "output_sequence_length": {"unit": "tokens", "avg": 540.0},
    "input_sequence_length": {"unit": "tokens", "avg": 3760.0},
    "benchmark_duration": {"unit": "sec", "avg": 48.0},
    "input_config": {
        "models": {"items": [{"name": "acme/tiny"}]},
        "phases": [
            {"name": "warmup", "exclude_from_results": True, "requests": 16, "concurrency": 99},
            {"name": "profiling", "requests": 100, "concurrency": 16},
        ],
    },
    "error_summary": [{"error": {"code": 500}, "count": 4}],
    "start_time": "2026-01-02T03:04:05.000000",
}

AIPERF_CSV = """Metric,avg,min,max,sum,p1,p5,p10,p25,p50,p75,p90,p95,p99,std
Request Latency (ms),"7,900.00",1.00,9.00,1,1,1,1,1,7800.00,1,1,9000.00,9900.00,1
Time to First Token (ms),230.00,75.04,693.93,1,1,1,1,1,180.00,1,1,600.00,700.00,1
Inter Token Latency (ms),12.00,7.49,13.31,1,1,1,1,1,12.00,1,1,13.00,13.50,1
Inter Chunk Latency (ms),99.00,7.49,13.31,1,1,1,1,1,12.00,1,1,13.00,13.50,1
Output Sequence Length (tokens),540.00,39.00,1526.00,1,1,1,1,1,1,1,1,1,1,1

Metric,Value
Benchmark Duration (sec),48.00
Request Count,96.00
Request Throughput (requests/sec),2.00
"""

INFERENCEMAX = {
    "hw": "h100",
    "conc": 32,
    "image": "acme/server:1",
    "model": "acme/tiny",
    "framework": "vllm",
    "precision": "fp8",
    "isl": 1024,
    "osl": 1024,
    "tp": 4,
    "ep": 1,
    "dp_attention": "false",
    "tput_per_gpu": 800.0,
    "output_tput_per_gpu": 400.0,
    "mean_ttft": 0.1,
    "median_ttft": 0.09,
    "p99_ttft": 0.4,
    "mean_tpot": 0.02,
    "median_tpot": 0.02,
    "p99_tpot": 0.021,
    "mean_e2el": 20.5,
    "median_e2el": 20.4,
    "p99_e2el": 22.0,
}

TIDY = (
    "series,model,hardware,engine,concurrency,request_rate_target,requests,completed,failed,duration_s,"
    "req_per_s,total_tok_per_s,ttft_p50_ms,e2e_mean_ms,e2e_p99_ms,repeat,note\n"
    "a,acme/tiny,H100,vLLM,8,,80,80,0,10,8,8000,30,1000,1200,,\n"
    "a,acme/tiny,H100,vLLM,16,,160,150,10,10,15,15000,40,1050,1300,1 valid of 3,request_timeout=30s\n"
    "b,acme/tiny,H100,vLLM,,4,100,100,0,25,4,4000,30,900,,,\n"
)
