"""What `accelerate launch` was asked for is read from its command line, and said where it did less."""

import pytest

from pretended_worlds import ARGV, TYPED, accelerate, read
from tunebook.launching.command import LaunchCommand, read_launch_command


class TestFewerThanAskedFor:
    ON_CPU = f"accelerate launch --config_file accelerate_configs/cpu.yaml --num_processes 2 {TYPED}"

    @pytest.mark.parametrize(
        "typed",
        [
            "python /bin/accelerate launch --cpu --num_processes 2",
            "accelerate launch --num_processes=2",
            "accelerate-launch --num-processes 2 -q",
            "python -m accelerate.commands.launch --num-processes=2",
            "python -u -m accelerate.commands.accelerate_cli launch --num_processes 4 --num_processes 2",
        ],
    )
    def test_on_the_cpu(self, typed):
        note = read(accelerate(MASTER_PORT="29500"), typed=typed).notes[0]
        assert note.startswith("1 process runs although 2 were asked for:")
        assert note.endswith(self.ON_CPU)

    def test_on_one_gpu(self):
        (note,) = read(accelerate(MASTER_PORT="29500"), 1, "accelerate launch --num_processes 2").notes
        assert "1 GPU is visible" in note
        assert note.endswith(f"CUDA_VISIBLE_DEVICES= {self.ON_CPU}")

    def test_by_a_config_file(self, tmp_path):
        file = tmp_path / "mine.yaml"
        file.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\n")
        (note,) = read(accelerate(MASTER_PORT="1"), typed=f"accelerate launch --config-file {file}").notes
        assert "1 process runs although 3 were asked for" in note

    def test_by_the_default_config(self, tmp_path):
        file = tmp_path / "accelerate" / "default_config.yaml"
        file.parent.mkdir()
        file.write_text("distributed_type: 'NO'\nnum_processes: 3\n")
        environ = accelerate(MASTER_PORT="1", HF_HOME=str(tmp_path))
        assert "3 were asked for" in read(environ, typed="accelerate launch").notes[0]
        assert "more were asked for" in read(environ, typed="accelerate launch --cpu").notes[0]

    def test_by_an_unknown_command(self):
        (note,) = read(accelerate(MASTER_PORT="29500")).notes
        assert note.startswith("1 process runs although more were asked for:")
        assert f"--num_processes N {TYPED}" in note

    def test_one_was_asked_for(self):
        assert read(accelerate(), typed="accelerate launch --num_processes 1").notes == ()
        assert read(accelerate(), typed="accelerate launch").notes == ()
        assert read(accelerate()).notes == ()

    def test_options_of_the_script_are_not_the_launchers(self):
        argv = ("finetune.py", "r.yaml", "--num_processes", "4", "--config_file", "nowhere.yaml")
        parent = ("accelerate", "launch", "--cpu", *argv)
        assert read_launch_command(parent, argv, {}) == LaunchCommand()
        assert read_launch_command(("bash", "-c", "accelerate"), argv, {}) is None

    @pytest.mark.parametrize("text", ["[1, 2]", "a: b: c", ""])
    def test_an_unreadable_config_says_nothing(self, text, tmp_path):
        file = tmp_path / "odd.yaml"
        file.write_text(text)
        command = read_launch_command(("accelerate", "launch", "--config_file", str(file), *ARGV), ARGV, {})
        assert command == LaunchCommand(config_file=str(file))
