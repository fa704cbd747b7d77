"""Faults that a forked rank makes for itself, chosen by FAULT and steered by FAULT_... variables.

Each prints `[fault]` when it strikes: one that never did shows nothing, and its test fails.
"""

import ctypes
import errno
import os
import signal
import sys
import time
from pathlib import Path


def number(name: str, default: int = 0) -> int:
    return int(os.environ.get(f"FAULT_{name}", default))


def is_here() -> bool:
    """Whether this rank is among those that FAULT_RANKS names; all are where it names none."""
    ranks = os.environ.get("FAULT_RANKS")
    return ranks is None or os.environ.get("RANK", "0") in ranks.split(",")


def say(what: str) -> None:
    print(f"[fault] rank {os.environ.get('RANK', '0')} {what}", file=sys.stderr, flush=True)


def ask_loopback_hub() -> None:
    """Take the Hub of HF_ENDPOINT for the one there is, which a client that is imported already would not."""
    from huggingface_hub import constants

    constants.ENDPOINT = os.environ["HF_ENDPOINT"]
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = False, True


def send_own_signal() -> None:
    name = os.environ["FAULT_SIGNAL"]
    say(name)
    for _ in range(number("TIMES", 1)):
        os.kill(os.getpid(), signal.Signals[name])
        time.sleep(0.3)  # the thread that acts on it needs a moment


def signal_in_window() -> None:
    """Get FAULT_SIGNAL before micro-batch FAULT_MICRO of the step after FAULT_STEP."""
    from tunebook.training.trainer import RecipeTrainer

    check_stop = RecipeTrainer.check_stop

    def check(trainer: RecipeTrainer) -> None:
        if (trainer.state.global_step, trainer._num_micro_steps) == (number("STEP"), number("MICRO")) and is_here():
            send_own_signal()
        check_stop(trainer)

    RecipeTrainer.check_stop = check


def hang() -> None:
    """Stand still before micro-batch FAULT_MICRO of the step after FAULT_STEP until FAULT_FILE exists, or for ever.

    FAULT_MODE says how: sleeping, frozen (stopped by the system) or deaf (no other Python thread can run either).
    """
    from tunebook.training.trainer import RecipeTrainer

    check_stop = RecipeTrainer.check_stop

    def check(trainer: RecipeTrainer) -> None:
        if (trainer.state.global_step, trainer._num_micro_steps) == (number("STEP"), number("MICRO")) and is_here():
            stand_still()
        check_stop(trainer)

    RecipeTrainer.check_stop = check


def hang_by_hand() -> None:
    """Stand still before the first loss of the step after FAULT_STEP in the loop written by hand."""
    import train_ddp

    take_step = train_ddp.Loop.take_step

    def take(loop, window):
        if loop.state.global_step == number("STEP") and is_here():
            stand_still()
        return take_step(loop, window)

    train_ddp.Loop.take_step = take


def hang_loading() -> None:
    """Stand still before the base is loaded, as where a shared disk does not answer."""
    from tunebook.training import ready

    build_model = ready.build_model

    def build(*args):
        if is_here():
            stand_still()
        return build_model(*args)

    ready.build_model = build


def stand_still() -> None:
    mode = os.environ["FAULT_MODE"]
    say(mode)
    if mode == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "deaf":
        ctypes.PyDLL(None).sleep(1000)
    go_on = Path(os.environ.get("FAULT_FILE", "/nowhere"))
    while not go_on.exists():
        time.sleep(0.05)


def tell_writes() -> None:
    """Append each path that this rank opens for writing, renames or deletes in the run folder to FAULT_FILE.<rank>."""
    told = os.open(f"{os.environ['FAULT_FILE']}.{os.environ.get('RANK', '0')}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    run_dir = Path.cwd() / sys.argv[sys.argv.index("--run-dir") + 1]

    def hear(event: str, values: tuple) -> None:
        writes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate")
        writes |= event == "open" and isinstance(values[2], int) and bool(values[2] & (os.O_WRONLY | os.O_RDWR))
        if writes and isinstance(values[0], str | os.PathLike):
            path = Path.cwd() / values[0]
            if path.is_relative_to(run_dir):
                os.write(told, f"{path}\n".encode())

    sys.addaudithook(hear)


def signal_in_evaluation() -> None:
    """Get FAULT_SIGNAL in the evaluation after FAULT_STEP."""
    from tunebook.training.trainer import RecipeTrainer

    evaluation_loop = RecipeTrainer.evaluation_loop

    def evaluate(trainer: RecipeTrainer, *args, **kwargs):
        if trainer.state.global_step == number("STEP") and is_here():
            send_own_signal()
        return evaluation_loop(trainer, *args, **kwargs)

    RecipeTrainer.evaluation_loop = evaluate


def signal_in_held_out_rows() -> None:
    """Get FAULT_SIGNAL at the first held-out row that the loop written by hand measures."""
    import train_ddp

    sum_losses, told = train_ddp.Loop.sum_losses, []

    def summed(loop, model, micro_batch):
        if not model.training and is_here() and not told:
            told.append(send_own_signal())
        return sum_losses(loop, model, micro_batch)

    train_ddp.Loop.sum_losses = summed


def signal_in_first_answers() -> None:
    """Get FAULT_SIGNAL when a run that is gone on with answers the held-out prompts before it trains."""
    from tunebook.training import run

    answer_held_out = run.answer_held_out

    def answer(trainer, ready):
        if is_here():
            send_own_signal()
        return answer_held_out(trainer, ready)

    run.answer_held_out = answer


def signal_in_last_answers() -> None:
    """Get FAULT_SIGNAL when training is over and the held-out prompts are answered."""
    from tunebook.training import run

    measure = run.measure_held_out

    def measure_held_out(trainer, ready):
        if trainer.state.global_step and is_here():
            send_own_signal()
        return measure(trainer, ready)

    run.measure_held_out = measure_held_out


def signal_while_loading() -> None:
    from tunebook.training import ready

    build_model = ready.build_model

    def build(*args):
        if is_here():
            send_own_signal()
        return build_model(*args)

    ready.build_model = build


def slow_preparation() -> None:
    """Take FAULT_SECONDS to prepare the data; with FAULT_OWN_CACHES each rank has a cache to itself, as machines do."""
    from tunebook.data import tokenise

    make = tokenise.Preparation.make
    if number("OWN_CACHES"):
        os.environ["TUNEBOOK_CACHE"] += os.environ["RANK"]

    def slow(preparation, folder):
        if is_here():
            say("prepares slowly")
            time.sleep(number("SECONDS"))
        return make(preparation, folder)

    tokenise.Preparation.make = slow


def break_saving() -> None:
    """Fail, or be killed, at the FAULT_NTH file named FAULT_FILE that torch or safetensors saves.

    FAULT_MODE is enospc (the disk is full), kill (before the file) or half (after half of it).
    """
    import safetensors.torch
    import torch

    seen = [0]

    def hook(save, place):
        def saved(*args, **kwargs):
            path = str(args[place])
            if path.endswith(os.environ["FAULT_FILE"]) and is_here():
                seen[0] += 1
                if seen[0] == number("NTH", 1):
                    strike(lambda: save(*args, **kwargs), path)
            return save(*args, **kwargs)

        return saved

    torch.save = hook(torch.save, 1)
    safetensors.torch.save_file = hook(safetensors.torch.save_file, 1)


def strike(save, path: str) -> None:
    mode = os.environ["FAULT_MODE"]
    say(f"{mode} at {path}")
    if mode == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    if mode == "half":
        save()
        os.truncate(path, os.path.getsize(path) // 2)  # noqa: PTH202
    os.kill(os.getpid(), signal.SIGKILL)


def no_room_for_files() -> None:
    """Have the system itself refuse to write files beyond FAULT_BYTES, as a full disk does in the middle of one."""
    import resource

    from tunebook.training import saving

    write = saving._write

    def limited(trainer, progress, *args):
        if progress.step >= number("STEP"):
            say(f"no file beyond {number('BYTES')} bytes")
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (number("BYTES"), resource.RLIM_INFINITY))
        try:
            return write(trainer, progress, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    saving._write = limited


def no_room_for_a_file() -> None:
    """Have no room from the FAULT_NTH to the FAULT_LAST time that a file named FAULT_FILE is opened to be written."""
    # Asked for now: libraries take variables away for a moment while other threads open files.
    name, first, last, here, seen = os.environ["FAULT_FILE"], number("NTH", 1), number("LAST", 1000), is_here(), [0]

    def hear(event: str, values: tuple) -> None:
        if event != "open" or not isinstance(values[0], str | os.PathLike) or not isinstance(values[2], int):
            return
        if here and Path(values[0]).name == name and values[2] & (os.O_WRONLY | os.O_RDWR):
            seen[0] += 1
            if first <= seen[0] <= last:
                say(f"no room for {values[0]}")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(hear)


def no_memory_for_the_model() -> None:
    """Run out of memory while the base is loaded, as on FAULT_MODE: cuda or cpu."""
    import torch

    from tunebook.model import model

    class Loader(model.AutoModelForCausalLM):
        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            if is_here():
                say("has no memory")
                if os.environ["FAULT_MODE"] == "cuda":
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory (injected)")
            return super().from_pretrained(*args, **kwargs)

    model.AutoModelForCausalLM = Loader


def out_of_memory() -> None:
    """Run out of memory in the FAULT_NTH backward pass."""
    import torch

    seen, backward = [0], torch.Tensor.backward

    def limited(tensor, *args, **kwargs):
        seen[0] += 1
        if seen[0] == number("NTH") and is_here():
            say("out of memory")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")
        return backward(tensor, *args, **kwargs)

    torch.Tensor.backward = limited


def cannot_see_checkpoints() -> None:
    """Be on a machine that does not have the run folder of rank 0."""
    from pathlib import Path

    from tunebook.training import starting

    if is_here():
        check_whole = starting.check_whole
        starting.check_whole = lambda folder: check_whole(Path("/nowhere") / folder)


def shard_on_cpu() -> None:
    """Have accelerate shard on the CPU, which it does on GPUs alone, and tell how many parameters are shards.

    The launch is taken for one on GPUs; accelerate's state calls the group MULTI_GPU from the moment that the run is
    built, before an AcceleratorState is made from it.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.tensor import DTensor

    from tunebook.launching import checks as launch_checks
    from tunebook.launching import sharding, world
    from tunebook.training import ready
    from tunebook.training.trainer import RecipeTrainer

    def shards(launch, num_processes):
        return num_processes > 1 and launch.environ.get("FSDP_VERSION") == "2"

    for module in (sharding, launch_checks, world):
        module.is_sharded = shards
    check_same_start, take_up = ready.check_same_start, RecipeTrainer.take_up

    def check(facts):
        check_same_start(facts)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    def tell_shards(trainer):
        parameters = list(trainer.model.parameters())
        say(f"{sum(isinstance(one, DTensor) for one in parameters)} of {len(parameters)} are shards")
        take_up(trainer)

    ready.check_same_start, RecipeTrainer.take_up = check, tell_shards


def tell_loading() -> None:
    from tunebook.training import ready

    build_model = ready.build_model

    def build(*args):
        say("loads weights")
        return build_model(*args)

    ready.build_model = build


def cannot_see_run_folder() -> None:
    """Be on a machine with a disk of its own: what rank 0 puts into the run folder is not there."""
    from tunebook.runs import folder as run_folder

    if is_here():
        run_folder.LOCK, run_folder.SECONDS_TO_BE_SEEN = "nowhere", 0.5


def other_packages() -> None:
    """Be on a machine that has another peft and another bitsandbytes."""
    from tunebook.training import ready

    tell_loading()
    version = ready.version
    other = {"peft": "0.20.9", "bitsandbytes": "0.49.9"}
    if is_here():
        ready.version = lambda name: other.get(name) or version(name)


def other_recipe() -> None:
    """Be on a machine whose copy of the recipe says another thing."""
    tell_loading()
    if is_here():
        recipe = Path(sys.argv[1])
        changed = recipe.with_name("other") / recipe.name
        changed.parent.mkdir(exist_ok=True)
        changed.write_text(recipe.read_text().replace("learning_rate: 1.0e-3", "learning_rate: 2.0e-3"))
        sys.argv[1] = str(changed)


def probe_without_memory() -> None:
    """Have no memory for a measurement without activation checkpointing."""
    from tunebook.training.probing import Bench

    pass_through = Bench.pass_through

    def ran_out(bench: Bench, micro_batch: dict) -> None:
        if is_here() and not bench.model.is_activation_checkpointing:
            say("has no memory")
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        pass_through(bench, micro_batch)

    Bench.pass_through = ran_out


def no_shape_known() -> None:
    """Know no shape to choose by, as on a machine whose Hub cache lacks the model's config."""
    from tunebook.training import choosing

    if is_here():
        say("knows no shape")
        choosing.find_shape = lambda *names: None
