"""The forecast of a dry run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import reshard
from reshard.commands import forecast as forecasts
from reshard.tensors.averages.mean import count_worker_nbytes


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({f"layers.{n}.weight": torch.randn(256, 256) for n in range(8)}, path)
    return path


def test_a_dry_run_forecasts_memory_disk_and_time(source, tmp_path):
    before = sorted(tmp_path.iterdir())
    target = tmp_path / "model.safetensors"
    report = reshard.merge(source, target, dtype="bf16", dry_run=True)
    assert sorted(tmp_path.iterdir()) == before
    forecast = report.forecast
    assert forecast.bytes_read == 8 * 256 * 256 * 4
    assert forecast.disk == forecast.bytes_written == report.bytes_written
    assert forecast.disk_free > forecast.disk
    assert min(forecast.read_rate, forecast.write_rate, forecast.verify_rate) > 0
    assert 0 < forecast.seconds < 60
    assert any(line.startswith("forecast    about ") for line in report.lines())
    assert report.to_dict()["forecast"]["disk"] == forecast.disk
    done = reshard.merge(source, target, dtype="bf16")
    assert done.forecast is None
    assert target.stat().st_size == forecast.disk


@pytest.mark.parametrize("options", [{}, {"to": "dcp"}], ids=["merge", "split"])
def test_a_forecast_has_the_memory_in_which_means_are_computed(options, source, tmp_path):
    other = tmp_path / "other.pt"
    other.write_bytes(source.read_bytes())
    needed = []

    def forecast(*_arguments, buffer_bytes, **_further):
        needed.append(buffer_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecasts, "forecast", forecast)
        one = reshard.merge(source, tmp_path / "merged", workers=2, dry_run=True)
        two = reshard.average(
            [source, other], tmp_path / "mean", workers=2, dry_run=True, **options
        )
    # What is read ahead needs memory, too, and these files are smaller than the limit of that.
    merged, mean = needed[0] - one.bytes_read, needed[1] - two.bytes_read
    # The windows of the two layouts differ by some kilobytes.
    assert mean == pytest.approx(merged + 2 * count_worker_nbytes(2), rel=0.01)


def test_without_a_rate_the_time_is_not_known():
    known = forecasts.Forecast(1, 2, None, 3, 4, 1.0, None, None, None)
    assert known.describe().startswith("time not known; memory 1 B, disk 2 B, reads 3 B at 1 B/s")
    assert replace(known, seconds=3700.0).describe().startswith("about 1 h 1 min")


def test_a_destination_that_cannot_be_written_has_no_rate(tmp_path):
    assert forecasts._probe_destination(None, 5) == (None, None)
    assert forecasts._probe_destination(tmp_path / "absent", 5) == (None, None)
