"""How long prefills take: the fit and the measurement."""

import pytest

from families import wrapped
from ragcachekit.model.prefill_profile import PrefillProfile, measure_profile

POINTS = [(cached, new) for cached in (0, 256) for new in (4, 16, 64, 256, 1024)]


def test_seconds_are_bilinear_but_for_attention_among_the_new():
    profile = PrefillProfile(0.5, 0.01, 1e-4)
    assert profile.seconds(300, 20) == pytest.approx(0.5 + 0.2 + 1e-4 * 20 * 310)
    assert profile.seconds(300, 0) == 0.0
    assert profile.seconds(300, 20) + profile.seconds(100, 20) == pytest.approx(2 * profile.seconds(200, 20))


@pytest.mark.parametrize(
    "true",
    [PrefillProfile(0.01, 1e-4, 1e-8), PrefillProfile(0.0, 1e-3, 1e-6), PrefillProfile(0.2, 0.0, 1e-7)],
)
def test_a_fit_finds_the_coefficients(true):
    fitted = PrefillProfile.fit([(*point, true.seconds(*point)) for point in POINTS])
    for cached, new in ((0, 8), (5000, 100), (0, 8000), (30_000, 1)):
        assert fitted.seconds(cached, new) == pytest.approx(true.seconds(cached, new), rel=1e-6)


def test_noise_gives_no_negative_times():
    noisy = [(c, n, 0.01 * (1 + (c + n) % 3 / 10)) for c, n in POINTS]
    fitted = PrefillProfile.fit(noisy)
    assert min(fitted.fixed, fitted.per_row, fitted.per_pair) >= 0
    assert 0 < fitted.seconds(0, 1) <= fitted.seconds(0, 1000) <= fitted.seconds(5000, 1000)


def test_a_model_is_measured():
    profile = measure_profile(wrapped("llama"), context=128, budget=0.0)
    assert 0 < profile.seconds(0, 16) < 10
