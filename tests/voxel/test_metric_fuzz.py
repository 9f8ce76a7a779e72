from benchmarks.cases.metric_fuzz import fuzz


def test_generated_inputs_give_a_result_or_a_typed_error():
    counts, others = fuzz(2000, seed=7)
    assert others == []
    assert min(counts.values()) > 200
