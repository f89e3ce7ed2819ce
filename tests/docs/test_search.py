"""The search of the built site finds the right page for what newcomers ask, and no logs of
benchmarks; the site is small.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docpages import ROOT

QUESTIONS = {  # a question -> pages that answer it; with a section, it is the page's best
    "how do I freeze the encoder?": {"cookbook/finetuning.html"},
    "will it fit on two 4090s?": {"cookbook/devices.html", "plan.html"},
    "my loss is NaN": {"cookbook/memory.html", "troubleshooting.html"},
    "use wandb": {"cookbook/tracking.html"},
    "EMA": {"cookbook/training.html"},
    "mixed precision": {"cookbook/training.html"},
    "fine-tune": {"cookbook/finetuning.html"},
    "resume": {"cookbook/devices.html", "tour.html"},
    "out of memory": {"cookbook/memory.html", "troubleshooting.html"},
    "multiple nodes slurm": {"cookbook/devices.html", "clusters.html"},
    "early stopping": {"cookbook/training.html"},
    "learning rate schedule": {"cookbook/training.html"},
    "gradient accumulation": {"cookbook/training.html"},
    "gradient clipping": {"cookbook/training.html"},
    "GAN": {"cookbook/loops.html"},
    "custom training loop": {"cookbook/loops.html"},
    "custom metric": {"cookbook/losses.html"},
    "padding mask": {"cookbook/losses.html"},
    "kubernetes": {"cookbook/devices.html", "clusters.html"},
    "profile": {"cookbook/tracking.html", "plan.html"},
    "tensorboard": {"cookbook/tracking.html"},
    "pytorch dataloader": {"cookbook/data.html"},
    "data too large for memory": {"cookbook/data.html"},
    "hyperparameter search": {"cookbook/after.html", "sweeps.html"},
    "lora": {"cookbook/finetuning.html", "pretrained.html"},
    "address already in use": {"troubleshooting.html"},
    "jax does not see my gpu": {"troubleshooting.html"},
    "stuck, hangs": {"troubleshooting.html"},
    "is not divisible": {"troubleshooting.html"},
    "keras": {"from_keras.html"},
    "pytorch lightning": {"from_lightning.html"},
    "accelerate": {"from_accelerate.html"},
    "maxtext": {"from_maxtext.html"},
    "weight decay": {"cookbook/training.html"},
    "progress bar": {"cookbook/tracking.html"},
    "save checkpoint own loop": {"cookbook/loops.html", "wire.html"},
    "multi gpu slurm": {"cookbook/devices.html", "clusters.html"},
    "resume training": {"cookbook/devices.html", "tour.html"},
    "export model": {"cookbook/after.html", "export.html"},
    "load Hugging Face model": {"pretrained.html", "cookbook/finetuning.html"},
    "how to save model": {"cookbook/after.html#save-export-a-model-that-runs-without-its-code"},
    "which layout should I use": {"mesh_layout_step.html"},
    "does my model fit on 8 GPUs": {"plan.html"},
    "validation set": {"cookbook/losses.html#evaluate-on-a-validation-set-during-training"},
    "data augmentation": {"cookbook/data.html#augment-images-data-augmentation-crops-flips"},
    "dropout": {"cookbook/training.html#use-dropout"},
    "KeyError batch": {"troubleshooting.html#the-loss-reads-a-key-that-the-batch-lacks-keyerror"},
    "No supported GPU devices found": {"troubleshooting.html#jax-does-not-see-the-gpu"},
    "wrong values jaxlib 0.11.2": {"clusters.html", "troubleshooting.html"},
    "max_replicated": {"troubleshooting.html#too-many-parameters-are-replicated-max_replicated"},
    "resume training after crash": {"cookbook/devices.html#stop-and-resume-training"},
    "How can I train on several GPUs?": {"cookbook/devices.html"},
    "How do I load my saved model for inference?": {"cookbook/after.html"},
    "How do I use a learning rate scheduler?": {
        "cookbook/training.html#use-a-learning-rate-schedule-with-warm-up"
    },
    "How do I save only the best checkpoint?": {
        "cookbook/training.html#early-stopping-stop-early-and-keep-the-best-weights"
    },
    "How do I use class weights for imbalanced data?": {
        "cookbook/losses.html#weight-classes-or-rows-class-weights-imbalanced-data"
    },
    "How do I count the parameters of a model?": {
        "cookbook/loops.html#count-parameters-and-see-what-a-layout-does-to-each"
    },
    "How much does it cost to train my model?": {
        "plan.html#how-long-does-training-take-and-what-does-it-cost"
    },
    "Is my result reproducible with a seed?": {
        "cookbook/training.html#make-a-run-repeatable-seed-reproducible-results"
    },
    "What do I do when I run out of GPU memory?": {"cookbook/memory.html"},
    "What happens when a node dies?": {"cookbook/devices.html", "clusters.html"},
    "Which optimizers can I use?": {"cookbook/training.html#use-muon-or-any-of-optaxs-optimizers"},
    "Why is my loss not going down?": {"troubleshooting.html#the-loss-does-not-go-down"},
    "Why doesn't JAX find my GPU?": {"troubleshooting.html#jax-does-not-see-the-gpu"},
}
FIRST = 3  # results that are seen without scrolling
LIMIT = 12e6  # bytes of the site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    pytest.importorskip("material")
    site = tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(site),
    ]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout + built.stderr
    return site


@pytest.fixture(scope="module")
def found(site):
    """Question -> the pages that the site's search lists, each as its parts, best first: the
    theme's own script ranks them, in node.
    """
    node, material = shutil.which("node"), pytest.importorskip("material")
    if node is None:
        pytest.skip("the search is a script, which node runs")
    (worker,) = (Path(material.__path__[0]) / "templates/assets/javascripts/workers").glob(
        "search*.js"
    )
    command = [
        node,
        str(Path(__file__).parent / "search.js"),
        str(worker),
        str(site / "search/search_index.json"),
        *QUESTIONS,
    ]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(answer.stdout)


def page_of(parts):
    return parts[0].partition("#")[0]


def seen(pages):
    """The first pages, and the best section of each."""
    return {
        part
        for parts in pages[:FIRST]
        for part in (page_of(parts), next((part for part in parts if "#" in part), None))
    }


@pytest.mark.system
def test_search_finds_the_page_that_answers(found):
    assert not {
        question: pages[:FIRST]
        for question, pages in found.items()
        if not QUESTIONS[question] & seen(pages)
    }


@pytest.mark.system
def test_search_finds_no_logs_of_benchmarks(found):
    assert not {
        question: pages
        for question, pages in found.items()
        if any(page_of(parts).startswith("benchmarks/") for parts in pages)
    }
    assert all(found.values())


@pytest.mark.system
def test_the_site_is_small_and_has_what_pages_load(site):
    files = [path for path in site.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LIMIT
    assert not [path.name for path in files if path.suffix == ".map"]
    loaded = {
        name
        for path in site.glob("*.html")
        for name in re.findall(
            r'(?:src|href)="([^":#?]+\.(?:js|css|svg|png))"', path.read_text("utf-8")
        )
    }
    assert loaded and not [name for name in loaded if not (site / name.lstrip("/")).is_file()]
