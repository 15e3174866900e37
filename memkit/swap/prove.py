"""What a watched run on a sample proves of each site."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..functional import Save
from .layers import FUSED, Choice, keeps_output
from .sites import LEAN, AnySite, Decision, Decisions, LayerSite, Site
from .structure import ALREADY, REBUILT, check, takes_bit
from .trial import Trial
from .types import FLOATS, INEXACT, KEEPS_OUTPUT, NEEDS_BIT, TWO_SLOPES, Proof
from .untouched import untouched
from .watch import Call, Watch, watched


def prove(
    trial: Trial, sites: Sequence[AnySite], norms: Sequence[nn.Module], exact: bool, lean: bool
) -> tuple[Decisions, set[torch.dtype], set[nn.Module]]:
    """What becomes of each site, the dtypes that they were called with, and norms whose results nobody keeps.

    ``norms``: those that become memkit's and are no sites.
    """
    refusals = {site: check(site, lean) for site in sites}
    open_sites = [site for site in sites if not refusals[site]]
    written = _written_in_other_mode(trial, open_sites, exact)
    watch = watched(trial, open_sites, norms, exact)
    for site, reason in written.items():
        for call in watch.calls.get(site, ()):
            call.written = call.written or reason
    watch.kept_elsewhere = set(watch.saved_elsewhere)
    # What layers keep in stock, by how many are not decided yet: two norms of one input had better both keep that.
    layers = [site for site in refusals if isinstance(site, LayerSite)]
    undecided = Counter(key for site in layers for key in _kept(site, watch, None))
    for block in (site.module for site in layers if site.is_block):  # which may call its norms in another way
        watch.wanted.update(part for part in block.modules() if part is not block)
    by_norms = {key for site in layers if site.is_norm for key in _kept(site, watch, None)}
    decisions: Decisions = {}
    for site, refusal in refusals.items():
        calls = watch.calls.get(site, [])
        if refusal or not calls:
            decisions[site] = Decision(None, refusal or "not called on the sample")
        elif isinstance(site, LayerSite):
            undecided.subtract(_kept(site, watch, None).keys())
            decisions[site] = _decide_layer(site, calls, watch, exact, lean, undecided)
        else:
            decisions[site] = _decide(site, calls, watch, exact, lean, by_norms)
            if decisions[site].proof is LEAN:
                watch.wanted.update(*(call.norms for call in calls))
                watch.rebuilt.update(call.output for call in calls)
        # What several sites keep counts for the first of them.
        watch.saved_elsewhere.update(_kept(site, watch, None))
        watch.kept_elsewhere.update(_kept(site, watch, decisions[site].proof))
    dtypes = {call.dtype for calls in watch.calls.values() for call in calls}
    return decisions, dtypes, watch.norms - watch.wanted


def _written_in_other_mode(trial: Trial, sites: Sequence[AnySite], exact: bool) -> dict[AnySite, str]:
    """Why outputs may not be saved in evaluation, of a model that is in training, or the other way round.

    An idle dropout returns its input, which the forward may then change; routers change their input by noise in training.
    Nothing of a model that does not run so on the sample.
    """
    model = trial.model
    other = not model.training
    try:
        with untouched(model):
            for module in model.modules():
                module.training = other
            watch = watched(trial, sites, (), exact)
    except Exception:
        return {}
    mode = "training" if other else "evaluation"
    return {
        site: f"{call.written} in {mode}"
        for site, calls in watch.calls.items()
        for call in calls
        if call.written
    }


def _decide(
    site: Site, calls: list[Call], watch: Watch, exact: bool, lean: bool, by_norms: set[int]
) -> Decision:
    decision = _decide_without_lean(site, calls, watch, exact, by_norms)
    before = decision.bytes_before
    if lean and _gains_from_lean(site, decision, calls):
        return Decision(LEAN, REBUILT, before, before)
    if site.keeps_output_already and not takes_bit(decision):
        return Decision(None, ALREADY, before, before)
    return decision


def _decide_without_lean(
    site: Site, calls: list[Call], watch: Watch, exact: bool, by_norms: set[int]
) -> Decision:
    if watch.backups:
        return Decision(None, "the forward changes a parameter")
    before, after = _before(site, watch), _after(site, calls, watch, exact)
    if site.feeds_convolution:  # which keeps its input no longer
        before += sum(
            {call.output: call.nbytes for call in calls if call.output in watch.saved_elsewhere}.values()
        )
    if site.fused:
        return Decision(FUSED, "", before, 0)
    dtypes = site.dtypes(exact) or FLOATS
    refused = [call.dtype for call in calls if call.dtype not in dtypes]
    if len(refused) == len(calls):
        return Decision(None, _why_not(site, refused[0]), before, before)
    written = next((call.written for call in calls if call.written), "")
    bits = _bits(site, calls, exact)
    # A norm may keep its input.
    from_bit = site.name in TWO_SLOPES and bits < after and not by_norms.intersection(c.output for c in calls)
    if from_bit:
        after = bits
    elif written and site.name not in KEEPS_OUTPUT:
        return Decision(None, written, before, before)
    holders = min(call.references for call in calls)
    seen = (
        (call.read for call in calls),
        (call.shown for call in calls),
        (call.later for call in calls if holders),
    )
    read = next(filter(None, chain(*seen)), "")
    if after > before:
        reasons = [read, "what follows does not keep its output: nothing to save"]
        return Decision(None, "; ".join(filter(None, reasons)), before, before)
    if after == before and read and not site.overwrites:
        return Decision(None, f"{read}; out of place nothing is saved", before, before)
    proof = Proof(
        inplace=True if site.overwrites else False if read else "auto",
        holders=holders,
        seen=frozenset(call.callers for call in calls),
        hooked=bool(site.module._forward_hooks),
        dtypes=site.dtypes(exact),
        save="bit" if from_bit else "output",
        training=site.module.training if site.layer is None else None,
        compiled=not all(call.behind_norm for call in calls),
    )
    reasons = [f"not in place: {read}" if read and not site.overwrites else "", site.restriction(exact)]
    return Decision(proof, "; ".join(filter(None, reasons)), before, after)


def _decide_layer(
    site: LayerSite, calls: list[Call], watch: Watch, exact: bool, lean: bool, undecided: Counter[int]
) -> Decision:
    before = _before(site, watch)
    if not any(call.dtype in FLOATS for call in calls):
        return Decision(None, f"called on {calls[0].dtype}", before, before)
    if lean and site.is_batch_norm_alone and site.module in watch.norms - watch.wanted:
        return Decision(None, "nothing keeps its result: nothing to save", before, before)
    if site.is_block:
        after = sum(
            call.dtype.itemsize * site.twin.kept(site.module, call.shape, lean) for call in calls if call.own
        )
        return Decision(site.choice, "", before, min(before, after))
    if not site.is_norm:
        after = sum(site.twin.bytes_kept(site.module, call.shape) for call in calls if call.own)
        return Decision(site.choice, "", before, after)
    if exact and torch.is_autocast_enabled(calls[0].device):
        reason = "its result is float32 under autocast: exact=False allows autocast's dtype"
        return Decision(None, reason, before, before)
    written = next((call.written for call in calls if call.written), "")
    hooked = bool(site.module._forward_hooks)
    from_input = _after_norm(site, calls, watch, "input")
    if not site.may_keep_output or written:
        reason = f"keeps its input: {written}" if site.may_keep_output else ""
        return Decision(Choice("input", hooked, exact), reason, before, from_input)
    if watch.rebuilt.issuperset(call.input for call in calls):  # and with it what the norm returns
        return Decision(Choice("input", hooked, exact), "", before, from_input)
    after = _after_norm(site, calls, watch, "auto")
    inputs = _kept(site, watch, Choice("input"))
    shared = _beyond({key: size for key, size in inputs.items() if undecided[key]}, watch.kept_elsewhere)
    if from_input - shared < after:  # the input is kept elsewhere, or will be; the output is not
        return Decision(Choice("input", hooked, exact), "", before, from_input)
    return Decision(Choice("auto", hooked, exact), "", before, after)


def _after_norm(site: LayerSite, calls: list[Call], watch: Watch, save: Save) -> int:
    """What a norm would keep that nothing else keeps."""
    statistics = sum(_statistics(site, call, _from_output(site, call, save)) for call in calls if call.own)
    return _beyond(_kept(site, watch, Choice(save)), watch.kept_elsewhere | watch.rebuilt) + statistics


def _statistics(site: LayerSite, call: Call, from_output: bool) -> int:
    """Bytes beside the tensor: a number a row, or two where the mean is needed as well; two of float64 a group."""
    module: Any = site.module
    twin: Any = site.twin
    if site.name == "group_norm":
        return 16 * call.shape[0] * int(module.num_groups)
    rows: int = call.shape.numel() // max(1, math.prod(twin.row_shape(module, call.shape)))
    return (
        (2 if site.name == "layer_norm" and not from_output else 1)
        * rows
        * (8 if call.dtype == torch.float64 else 4)
    )


def _kept(site: AnySite, watch: Watch, proof: Any) -> dict[int, int]:
    """Sizes of the storages that a site keeps, by key: as stock without a proof, as an activation or a norm with one."""
    kept: dict[int, int] = {}
    for call in watch.calls.get(site, ()):
        if proof is None or call.dtype not in (getattr(proof, "dtypes", None) or FLOATS):
            kept |= call.own
        elif call.own and proof is not FUSED and _keeps_tensor(site, proof):
            kept[call.output if _from_output(site, call, proof.save) else call.input] = call.nbytes
    return kept


def _keeps_tensor(site: AnySite, proof: Any) -> bool:
    return proof.save != "bit" if isinstance(site, Site) else site.is_norm


def _from_output(site: AnySite, call: Call, save: Save) -> bool:
    if isinstance(site, Site):
        return save == "output"
    return save == "auto" and keeps_output(site.twin, site.module, call.shape, call.dtype)


def _beyond(kept: dict[int, int], elsewhere: set[int]) -> int:
    """Of these storages, by key, the bytes of those that nothing else keeps."""
    return sum(size for key, size in kept.items() if key not in elsewhere)


def _before(site: AnySite, watch: Watch) -> int:
    """What it keeps in stock that nothing else keeps."""
    return _beyond(_kept(site, watch, None), watch.saved_elsewhere)


def _gains_from_lean(site: Site, decision: Decision, calls: list[Call]) -> bool:
    """Either not proven, or given a sum or a norm's result, which may be rebuilt as well; or exact, for as many bytes.

    One that overwrites its input: where that is a norm's result, which is rebuilt only if nobody changes it.
    """
    if site.overwrites:
        return any(call.of_a_norm for call in calls)
    rebuilt = sum(call.nbytes for call in calls if call.of_a_sum or call.of_a_norm)
    most = 2 * rebuilt > sum(call.nbytes for call in calls)  # others keep their input for their output
    return decision.proof is None or ((most or site.name in INEXACT) and decision.proof is not FUSED)


def _why_not(site: Site, dtype: torch.dtype) -> str:
    if dtype not in FLOATS:
        return f"called on {dtype}"
    if site.name not in INEXACT or site.name == "softplus":
        return f"stock in {dtype}"
    error = INEXACT[site.name][dtype == torch.bfloat16]
    return f"its slope from the output may be off by {error:g} in {dtype}: exact=False allows it"


def _after(site: Site, calls: list[Call], watch: Watch, exact: bool) -> int:
    """What an activation would keep from its output that nothing else keeps."""
    proof = Proof(False, dtypes=site.dtypes(exact))
    bits = _bits(site, calls, exact) if site.name in NEEDS_BIT else 0
    return _beyond(_kept(site, watch, proof), watch.kept_elsewhere) + bits


def _bits(site: Site, calls: list[Call], exact: bool) -> int:
    """Bytes of one bit an element."""
    dtypes = site.dtypes(exact) or FLOATS
    return sum(-(-call.shape.numel() // 8) for call in calls if call.own and call.dtype in dtypes)
