"""Trainers of other libraries on a placed model, compared with the same trainers on a plain model:
losses, checkpoints and resuming.

With SGD, a power of two as learning rate and no clipping, every bit equals torch's; otherwise the
printed values are equal.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path

import pytest
import torch
import tqdm

import roadtrain
from roadtrain.errors import ConfigError, LoopError
from roadtrain.integrations.huggingface import Placed, groups_of

os.environ["HF_HUB_OFFLINE"] = "1"
tqdm.tqdm.monitor_interval = 0  # no monitor thread
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

QUIET = {"host_budget": "128MiB", "report": lambda _: None}
REST = pytest.mark.exhaustive  # further combinations of options
EXACT = {"optimizer": torch.optim.SGD, "lr": 0.125}


def llama(tied=False, seed=0):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            vocab_size=64,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            mlp_bias=True,
        )
    )


def rows(count=64):
    draws = (
        torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(i))
        for i in range(count)
    )
    return [{"input_ids": row, "labels": row} for row in draws]


def batch(step):
    inputs = torch.stack([row["input_ids"] for row in rows()[4 * step : 4 * step + 4]])
    return {"input_ids": inputs, "labels": inputs}


def printed(history):
    """Return the lines of a log with the precision at which the Trainer prints."""
    return [
        f"{entry['loss']:.4g} {entry['learning_rate']:.4g} {entry.get('grad_norm', 0.0):.4g}"
        for entry in history
        if "loss" in entry
    ]


def trained(model, directory, steps=8, placed=None, resume=None, **options):
    """Train with a Trainer. Returns its log, model and optimizer."""
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "optim": "adamw_torch", **options}
    args = transformers.TrainingArguments(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_steps=4,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
        **settings,
    )
    placing = {} if placed is None else {"optimizer_cls_and_kwargs": (Placed, {**placed, **QUIET})}
    trainer = transformers.Trainer(model, args, train_dataset=rows(), **placing)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        inner = trainer.optimizer.optimizer
        if placed is not None:
            inner.close()
    return trainer.state.log_history, trainer.model, inner


@pytest.mark.parametrize(
    ("tied", "store"),
    [
        pytest.param(tied, store, id=f"{tied}-{where}", marks=() if tied == store else REST)
        for tied in (False, True)
        for store, where in ((False, "RAM"), (True, "files"))
    ],
)
def test_the_trainer_logs_the_same_as_without_placement(tmp_path, store, tied):
    """This includes clipping at 1.0, accumulation, weight decay and a falling learning rate."""
    plain, model, optimizer = trained(llama(tied), tmp_path / "plain")
    options = {
        "optimizer": torch.optim.AdamW,
        "lr": 1e-2,
        "store": tmp_path / "store" if store else None,
    }
    ours, _, placed = trained(llama(tied), tmp_path / "placed", placed=options)
    assert printed(ours) == printed(plain) and len(printed(plain)) == 8
    assert all(float(line.split()[2]) > 1 for line in printed(plain)), "nothing was clipped"
    groups = [
        [(len(g["params"]), g["weight_decay"], g["betas"], g["eps"]) for g in o.param_groups]
        for o in (optimizer, placed)
    ]
    assert groups[0] == groups[1] and [g[1] for g in groups[0]] == [0.1, 0.0]
    assert (
        os.path.getsize(tmp_path / "placed" / "checkpoint-8" / "optimizer.pt") < 10_000
    ) == store
    loaded = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "placed" / "checkpoint-8"
    ).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(loaded[name], value, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_the_trainer_has_the_bits_of_torch(tmp_path, bf16):
    settings = {
        "bf16": bf16,
        "max_grad_norm": 0.0,
        "weight_decay": 0.0,
        "learning_rate": 0.125,
        "lr_scheduler_type": "constant",
    }
    plain, model, _ = trained(llama(), tmp_path / "plain", **settings, optim="sgd")
    ours, placed_model, _ = trained(
        llama(), tmp_path / "placed", placed={**EXACT, "store": tmp_path / "s"}, **settings
    )
    losses = [[entry["loss"] for entry in history if "loss" in entry] for history in (plain, ours)]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    values = placed_model.state_dict()  # read from the files of a closed optimizer
    assert all(torch.equal(values[n], v) for n, v in model.state_dict().items())
    checkpoint = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "placed" / "checkpoint-8"
    ).state_dict()
    assert all(torch.equal(checkpoint[n], v) for n, v in model.state_dict().items())


def test_the_trainer_resumes_from_ram(tmp_path):
    settings = {"lr_scheduler_type": "constant"}
    whole, _, _ = trained(llama(), tmp_path / "all", steps=8, placed={"lr": 1e-2}, **settings)
    last = tmp_path / "all" / "checkpoint-4"
    ours, _, placed = trained(
        llama(seed=3), tmp_path / "run", resume=str(last), placed={"lr": 1e-2}, **settings
    )
    both = [
        [(e["step"], e["loss"], e["grad_norm"]) for e in log if "loss" in e]
        for log in (ours, whole)
    ]
    assert both[0] == both[1] and len(both[0]) == 8 and placed.steps_done == 8


@pytest.mark.parametrize("whole", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_the_trainer_resumes_its_checkpoint(tmp_path, whole):
    """A checkpoint needs the store that it refers to; a whole checkpoint also works with an empty
    store, at any step. The resumed run has the same bits."""
    settings = {"lr_scheduler_type": "constant"}
    options = {"lr": 1e-2, "whole_checkpoints": whole}
    plain, _, _ = trained(
        llama(), tmp_path / "all", steps=12, placed={**options, "store": tmp_path / "a"}, **settings
    )
    trained(llama(), tmp_path / "run", placed={**options, "store": tmp_path / "s"}, **settings)
    store = tmp_path / ("other" if whole else "s")
    last = tmp_path / "run" / f"checkpoint-{4 if whole else 8}"
    ours, _, placed = trained(
        llama(seed=3),
        tmp_path / "run",
        steps=12,
        resume=str(last),
        placed={**options, "store": store},
        **settings,
    )
    both = [
        [(e["step"], e["loss"], e["grad_norm"]) for e in log if "loss" in e]
        for log in (ours, plain)
    ]
    assert both[0] == both[1] and len(both[0]) == 12 and placed.steps_done == 12
    with pytest.raises(LoopError, match=r"step 4 .* step 12.*\n?.*Nothing was changed"):
        trained(
            llama(),
            tmp_path / "again",
            steps=12,
            resume=str(tmp_path / "run" / "checkpoint-4"),
            placed={**options, "store": store},
            **settings,
        )


def test_placed_works_without_a_trainer():
    model = llama()
    placed = Placed()(model, lr=1e-2, weight_decay=0.25, **QUIET)
    with placed:
        assert [g["weight_decay"] for g in placed.param_groups] == [0.25, 0.0]
        names = {id(p): n for n, p in model.named_parameters()}
        plain = [names[id(p)] for p in placed.param_groups[1]["params"]]
        assert plain and all("norm" in n or "bias" in n for n in plain)
        assert not any(
            "norm" in names[id(p)] or "bias" in names[id(p)]
            for p in placed.param_groups[0]["params"]
        )
    with pytest.raises(ConfigError, match="pass a class like"):
        Placed()(llama(), optimizer="adamw", **QUIET)
    frozen = llama().requires_grad_(False)
    assert [g["params"] for g in groups_of(frozen, 0.1)] == [[], []]


def accelerated(tmp_path, place, saved=None, seed=0, steps=range(6), clip=True):
    """Run the loop of accelerate's own guide. Returns the losses and the state of the model.

    saved: Directory in which a state is saved after step 3, or from which it is loaded if the loop
        does not begin at step 0.
    """
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama(seed=seed)
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        if clip
        else torch.optim.SGD(model.parameters(), lr=0.125, foreach=False)
    )
    with contextlib.ExitStack() as stack:
        if place is not None:
            optimizer = stack.enter_context(roadtrain.place(model, optimizer, **place, **QUIET))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 2))
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if steps[0]:
            accelerator.load_state(saved)
        losses = []
        for step in steps:
            for half in (0, 2):
                with accelerator.accumulate(model):
                    loss = model(**{k: v[half : half + 2] for k, v in batch(step).items()}).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and clip:
                        losses.append(
                            f"{float(accelerator.clip_grad_norm_(model.parameters(), 1.0)):.5g}"
                        )
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(f"{loss.item():.5g}" if clip else loss.item())
            if saved is not None and step == 3 and not steps[0]:
                accelerator.save_state(saved)
        return losses, {n: v.clone() for n, v in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize(
    ("clip", "store"),
    [
        pytest.param(clip, store, id=f"{clip}-{where}", marks=() if clip == store else REST)
        for clip in (True, False)
        for store, where in ((False, "RAM"), (True, "files"))
    ],
)
def test_accelerate_trains_as_without_placement(tmp_path, store, clip):
    plain, model = accelerated(tmp_path, None, clip=clip)
    ours, placed = accelerated(tmp_path, {"store": tmp_path / "s" if store else None}, clip=clip)
    assert ours == plain and list(model) == list(placed)
    assert clip or all(torch.equal(placed[n], v) for n, v in model.items())


def test_accelerate_saves_and_loads(tmp_path):
    saved, store = str(tmp_path / "saved"), {"store": tmp_path / "s"}
    whole, _ = accelerated(tmp_path, {"store": tmp_path / "all"})
    first, _ = accelerated(tmp_path, store, saved, steps=range(4))
    later, _ = accelerated(tmp_path, store, saved, seed=5, steps=range(4, 6))
    assert first + later == whole
    held = Path(saved, "model.safetensors").stat().st_size
    assert held > 4 * sum(p.numel() for p in llama().parameters())
    with pytest.raises(LoopError, match=r"step 4 of the same store .* at step 6"):
        accelerated(tmp_path, store, saved, seed=5, steps=range(4, 6))


peft = pytest.importorskip("peft")


pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:transformers", "ignore::FutureWarning:peft"
)


def adapted(more=None):
    base = llama()
    torch.manual_seed(0)
    return peft.get_peft_model(
        base,
        peft.LoraConfig(
            r=4,
            target_modules=["q_proj", "v_proj"],
            lora_dropout=0.0,
            init_lora_weights=False,
            modules_to_save=more,
        ),
    )


def lora_steps(model, optimizer, steps):
    losses = []
    for step in steps:
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_trainer_trains_adapters(tmp_path):
    plain, _, _ = trained(adapted(), tmp_path / "plain")
    log, _, _ = trained(
        adapted(), tmp_path / "placed", placed={"lr": 1e-2, "store": tmp_path / "s"}
    )
    assert printed(log) == printed(plain)
    theirs, ours = (
        peft.utils.load_peft_weights(str(tmp_path / d / "checkpoint-8"), device="cpu")
        for d in ("plain", "placed")
    )
    assert theirs.keys() == ours.keys() and len(ours) == 12
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("store", "more"), [(False, None), pytest.param(True, None, marks=REST), (True, ["lm_head"])]
)
def test_adapters_of_a_streamed_base(tmp_path, store, more):
    """The base is frozen and fetched during the forward; adapters are trained, saved by PEFT and
    loaded again."""
    plain = adapted(more)
    losses = lora_steps(
        plain, torch.optim.SGD(plain.parameters(), lr=0.125, foreach=False), range(4)
    )
    model = adapted(more)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.125, foreach=False
    )
    placed = roadtrain.place(model, optimizer, store=tmp_path / "s" if store else None, **QUIET)
    assert lora_steps(model, placed, range(4)) == losses
    model.save_pretrained(tmp_path / "adapter")
    read, original = [], placed.session.pieces
    placed.session.pieces = lambda name, what: read.append(name) or original(name, what)
    state = model.state_dict()
    few = {name: state[name] for name in state if "lora_" in name or "modules_to_save" in name}
    model.save_pretrained(tmp_path / "few", state_dict=few)
    assert len(read) == len(few) == 12 + bool(more), (
        "the base is read although only names are needed"
    )
    plain.save_pretrained(tmp_path / "theirs")
    ours, fewer, theirs = (
        peft.utils.load_peft_weights(str(tmp_path / d), device="cpu")
        for d in ("adapter", "few", "theirs")
    )
    assert ours.keys() == fewer.keys() == theirs.keys() and len(theirs) == 12 + bool(more)
    assert all(torch.equal(ours[n], v) and torch.equal(fewer[n], v) for n, v in theirs.items())
    now, then = peft.get_peft_model_state_dict(model), peft.get_peft_model_state_dict(plain)
    assert all(torch.equal(now[n], v) for n, v in then.items()) and now.keys() == then.keys()
    for merge in (
        model.merge_and_unload,
        model.merge_adapter,
        model.base_model.merge_and_unload,
        model.base_model.model.model.layers[0].self_attn.q_proj.merge,
    ):
        with pytest.raises(LoopError, match="nothing was merged"):
            merge()
    changed = {n: v * 2 for n, v in now.items()}
    peft.set_peft_model_state_dict(model, changed)
    again = peft.get_peft_model_state_dict(model)
    assert all(torch.equal(again[n], v) for n, v in changed.items())
    placed.close()
    fresh = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").merge_and_unload()
    assert torch.equal(fresh(**batch(0)).loss, plain.merge_and_unload()(**batch(0)).loss)


lightning = pytest.importorskip("lightning")


class Lit(lightning.LightningModule):
    """place: Options of `place`, None for plain training. With SGD the whole module is placed, else
    its model."""

    def __init__(self, place=None, sgd=False, seed=0):
        super().__init__()
        self.model, self.options, self.sgd = llama(seed=seed), place, sgd
        self.seen = []

    def training_step(self, batch, _):
        loss = self.model(**batch).loss
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = (
            torch.optim.SGD(self.parameters(), lr=0.125, foreach=False)
            if self.sgd
            else torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)
        )
        if self.options is None:
            return optimizer
        part = self if self.sgd else self.model
        self.placed = roadtrain.place(part, optimizer, **self.options, **QUIET)
        return self.placed


def fitted(where, module, steps, resume=None, clip=1.0):
    loader = torch.utils.data.DataLoader(rows(), batch_size=4)
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(
        where, every_n_train_steps=2, save_top_k=-1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of Lightning: few workers, old names
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            accumulate_grad_batches=2,
            gradient_clip_val=clip,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[checkpoints],
        )
        trainer.fit(module, loader, ckpt_path=resume)
    return module


@pytest.mark.parametrize("exact", [False, True])
def test_lightning_trains_saves_and_loads(tmp_path, exact):
    clip = None if exact else 1.0
    begun = fitted(tmp_path / "begun", Lit(sgd=exact), 4, clip=clip)
    plain = fitted(
        tmp_path / "plain", Lit(sgd=exact), 6, next((tmp_path / "begun").glob("*step=4.ckpt")), clip
    )
    store = {"store": tmp_path / "s"}
    module = fitted(tmp_path / "mine", Lit(store, exact), 4, clip=clip)
    state = module.state_dict()
    module.placed.close()
    resume = next((tmp_path / "mine").glob("*step=4.ckpt"))
    saved = torch.load(resume, weights_only=False)
    assert saved["state_dict"].keys() == plain.state_dict().keys()
    assert all(
        torch.equal(saved["state_dict"][n], v) and not v.isnan().any() for n, v in state.items()
    )
    later = fitted(tmp_path / "later", Lit(store, exact, seed=4), 6, str(resume), clip)
    losses = module.seen + later.seen
    if exact:
        assert losses == begun.seen + plain.seen
        assert all(torch.equal(later.state_dict()[n], v) for n, v in plain.state_dict().items())
    assert [f"{x:.5g}" for x in losses] == [f"{x:.5g}" for x in begun.seen + plain.seen] and len(
        losses
    ) == 12
    later.placed.close()
    anew = Lit(store, exact)  # the same command after a kill
    with pytest.raises(
        LoopError, match="Lightning's Trainer is at step 0, but the store is at step 6"
    ):
        fitted(tmp_path / "anew", anew, 8, clip=clip)
    assert anew.placed.steps_done == 6
    anew.placed.close()
    old = next((tmp_path / "mine").glob("*step=2.ckpt"))
    refused = Lit(store, exact)
    with pytest.raises(LoopError, match=r"step 2 of the same store .* at step 6"):
        fitted(tmp_path / "old", refused, 6, str(old), clip)
    refused.placed.close()
