"""What is known about the answers of an estimated policy: the record of ``calibrate``, or how to get one."""

from __future__ import annotations

from typing import Any

from ragcachekit.commands.own_files import OwnFiles
from ragcachekit.model.identity.fingerprint import fingerprint
from ragcachekit.model.pretrained import weights_folder
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.plan.encodings import Encodings
from ragcachekit.policies.registry import open_policy
from ragcachekit.quality.records import Calibration, calibration_path, read_calibration


def quality_of(settings: OwnFiles, model: Any, tokenizer: Any) -> str:
    """One line: what the policy was measured to lose, with the record's path, or how to measure it."""
    policy = open_policy(settings.policy)
    encoder = settings.chunk_encoder or policy.encoder or "standalone"
    encoder = Encodings(encoder, describe_rope(model), tokenizer.bos_token_id).name
    folder, record = settings.folder.path, None
    if (folder / "calibrations").is_dir():  # else spare the digest of the weights
        source = weights_folder(settings.model)
        digest = fingerprint(model, tokenizer, source=source, cache=folder / "digests.json").digest
        record = read_calibration(folder, digest, settings.namespace)
        if record is not None and record.encoder == encoder and (line := _measured(record, policy.name)):
            return f"{line}; record: {calibration_path(folder, digest, settings.namespace)}"
    return (
        f"quality: not measured for {policy.name} on {encoder}, so whether answers stay good is open; "
        f"measure it: ragcachekit calibrate --model {settings.model} --corpus {settings.corpus} "
        f"--encoder {encoder} --policies {policy.name} --namespace {settings.namespace}"
        + (f" --cache {settings.cache}" if settings.cache else "")
    )


def _measured(record: Calibration, policy: str) -> str | None:
    for point in record.curve:
        if point.policy == policy:
            return (
                f"quality: {policy} on {record.encoder} lost {point.loss:.4f} ({record.quality}) against "
                f"full on {point.n} {record.sample}, surely at most {point.upper:.4f} (90 %)"
            )
    return None
