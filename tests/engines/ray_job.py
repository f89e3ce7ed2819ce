"""Run `engine_job.py` in two workers of Ray Train, which starts them again after a failure."""

import os
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer


def train(config):
    sys.path.insert(0, str(Path(config["job"]).parent))
    import engine_job

    engine_job.main(config["words"])


def main():
    folder, *words = sys.argv[1:]
    job = str(Path(__file__).with_name("engine_job.py"))
    variables = {name: os.environ[name] for name in ("JAX_PLATFORMS", "PYTHONPATH", "XLA_FLAGS")}
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    JaxTrainer(
        train,
        train_loop_config={"job": job, "words": [folder, *words]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="engines",
            storage_path=f"{folder}/ray",
            failure_config=FailureConfig(max_failures=1),
            worker_runtime_env={"env_vars": variables},
        ),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
