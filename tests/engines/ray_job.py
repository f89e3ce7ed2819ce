"""Run `engine_job.py` in two workers of Ray, which starts them again after a failure."""

import argparse
import os
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer

sys.path.insert(0, str(Path(__file__).parent))


def train(config):
    """Train in a worker of Ray Train."""
    sys.path.insert(0, config["path"])
    import engine_job

    import spmd

    engine_job.main(config["words"], callbacks=[spmd.ray.report(every=10)])


@ray.remote(num_cpus=1)
class Actor:
    """A process of plain Ray, without Ray Train."""

    def train(self, config, rank, size, address, token):
        """Join the others, and train."""
        sys.path.insert(0, config["path"])
        import engine_job

        import spmd

        spmd.join(spmd.World(rank, size, address, "plain actors", token=token))
        engine_job.main(config["words"])


def train_with_actors(config):
    """Start two actors, and give each its place."""
    actors = [Actor.remote() for _ in range(2)]
    address = os.environ["SPMD_COORDINATOR"]
    calls = [
        actor.train.remote(config, rank, len(actors), address, "a secret of both")
        for rank, actor in enumerate(actors)
    ]
    ray.get(calls)


def train_with_ray_train(config, folder, has_gpus):
    """Train in Ray Train, with a GPU for each worker that does not exist, or without."""
    resources = {"use_gpu": True, "resources_per_worker": {"GPU": 1}} if has_gpus else {}
    result = JaxTrainer(
        train,
        train_loop_config=config,
        jax_config=JaxConfig(),
        scaling_config=ScalingConfig(num_workers=2, **resources),
        run_config=RunConfig(
            name="engines",
            storage_path=f"{folder}/ray",
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    with result.checkpoint.as_directory() as checkpoint:
        print("CHECKPOINT", Path(checkpoint, "spmd.json").read_text())
    print("RESULT", result.metrics["loss"])


def main():
    """Run the job of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--actors", action="store_true")
    parser.add_argument("--gpus", action="store_true", help="pretend that there are two")
    options = parser.parse_args()
    words = [options.folder] + (["--kill"] if options.kill else [])
    config = {"path": str(Path(__file__).parent), "words": words}
    names = ("JAX_PLATFORMS", "PYTHONPATH", "XLA_FLAGS", "SPMD_COORDINATOR")
    ray.init(
        num_cpus=2,
        num_gpus=2 if options.gpus else 0,
        include_dashboard=False,
        runtime_env={"env_vars": {name: os.environ[name] for name in names}},
        _node_ip_address="127.0.0.1",
    )
    if options.actors:
        train_with_actors(config)
    else:
        train_with_ray_train(config, options.folder, options.gpus)
    ray.shutdown()


if __name__ == "__main__":
    main()
