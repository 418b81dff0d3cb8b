"""The frozen weights to which the adapters of a checkpoint belong."""

from collections.abc import Collection

from train_loop.errors import ModelError
from train_loop.model.weight_map import some
from train_loop.run_dir import BaseWeights, Manifest


def check_base(now: BaseWeights | None, manifest: Manifest) -> None:
    """Raise ModelError if a checkpoint's adapters belong to other frozen weights than those of this run."""
    then = manifest.base
    if then == now:
        return
    if then is not None and now is not None and then.sha256 == now.sha256:
        if (fault := other_quantization(manifest, now.quantized)) is not None:
            raise ModelError(fault)
        return
    which = f"the checkpoint of step {manifest.step}"
    if then is None or now is None:
        has, lacks = ("adapters", "trains all weights") if now is None else ("all weights", "trains adapters")
        raise ModelError(f"{which} has {has}, and this run {lacks}; start from another checkpoint, or a new run")
    if now.path is None:
        raise ModelError(
            f"{which} has adapters for random weights with the SHA-256 {then.sha256[:12]}, and those drawn now have "
            f"{now.sha256[:12]}; use its versions ({', '.join(f'{n} {v}' for n, v in manifest.versions.items())}), its "
            "config and its training.seed, or start a new run"
        )
    raise ModelError(
        f"{which} has adapters for the weights of {then.path} with the SHA-256 {then.sha256[:12]}, and {now.path} now "
        f"has {now.sha256[:12]}; restore its files, or start a new run"
    )


def check_trained(trained: Collection[str], saved: Collection[str], manifest: Manifest) -> None:
    """Raise ModelError if a checkpoint's trained weights, by name, are not those that this run trains with adapters."""
    if manifest.base is None or not (lost := [name for name in trained if name not in saved]):
        return
    raise ModelError(
        f"the checkpoint of step {manifest.step} has adapters, and none of {some(lost)}, which this run trains: it has "
        "another model.lora, or is of an earlier version of Trainshed, for which names chose fewer modules; continue "
        "and export it with that spec and version, or start a new run"
    )


def other_quantization(manifest: Manifest, quantize_base: str | None) -> str | None:
    """Return why a run cannot continue the adapters of a checkpoint, if they belong to a base with other values."""
    if manifest.base is None or manifest.base.quantized == quantize_base:
        return None
    then, now = (kind or "null" for kind in (manifest.base.quantized, quantize_base))
    return (
        f"the adapters of step {manifest.step} were trained with quantize_base={then}, and quantize_base={now} gives "
        f"the frozen weights other values; keep quantize_base: {then}, or export the adapters and name their folder in "
        "model.adapter, which begins a new run"
    )
