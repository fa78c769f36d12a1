"""The invariants I-01 to I-30, each a test over everything that the package exports.

A property is written once and applied to every exported loss, estimator, reduction, KL estimator and correction.
:mod:`properties.exports` holds one example or more of each; an export without one fails ``test_exports.py``, and an
option without a perturbation fails ``test_i_10_*.py``. Batches come from hypothesis (:mod:`properties.batches`):
ragged rows with holes, empty rows, rows whose every token is masked, rows that left training, singleton groups and
padding rows, the same in every run.

Tests are named after their invariant. These do not apply yet, or apply elsewhere:

==================  ===================================================================================================
invariant           why there is no test of it here
==================  ===================================================================================================
I-05, cp and sp     There is no context or sequence parallelism: a row lies on one rank. The data-parallel part is
                    here, simulated; with real processes it is in ``tests/strategies/test_ddp.py``.
I-06                There are no slices of a row, hence no gather of them.
I-08, temperature   Every log-probability comes from one function with one temperature: ``tests/policy``. That it does
                    not reach the critic is tested there as well. Here: what follows once the policies are equal.
I-13, queues        Nothing is generated ahead, so nothing is queued or running. Sampled = kept + filtered is here.
I-14, left padding  Responses are padded on the right or packed; packed against padded is ``tests/test_invariance.py``.
I-16, bfloat16      Log-probabilities are float32 for every precision of the policy: ``tests/policy``. Here: float32
                    against float64, and statistics in float64 from any input.
I-18, chunks        One cut into microbatches of one step is all that exists; there is no second entry that could
                    clear a gradient.
I-20, many engines  The fake engine answers at once, so no weights change within a response. The versions that it
                    gives are tested here.
I-30, chunks        There is no chunked scan. Returns are compared with a quadratic form, and chunks of them are joined
                    through ``bootstrap``.
==================  ===================================================================================================
"""
