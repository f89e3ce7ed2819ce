"""Combined predictions of several models, their uncertainty and metrics: arithmetic on the host, in
float64.

Logits are [members, ..., classes], probabilities [..., classes], labels integers [...].
"""

import numpy as np

COMBINE = ("mean", "vote", "logits")
BINS = 15
SHARPEST, FLATTEST = 0.02, 50.0  # temperatures


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities, over the last dim."""
    # Less the maximum, so that exp does not overflow.
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def log_combined(logits: np.ndarray, combine: str) -> np.ndarray:
    """Combined log probabilities: from the mean of probabilities, softmax of mean logits, or shares
    of votes.

    Example:
      >>> votes = np.array([[[2.0, 0.0]], [[0.0, 1.0]], [[5.0, 0.0]]])
      >>> np.exp(log_combined(votes, "vote")).round(2).tolist()
      [[0.67, 0.33]]
    """
    if combine == "logits":
        return log_softmax(logits.astype(np.float64).mean(axis=0))
    if combine == "mean":
        # probabilities may underflow
        return np.logaddexp.reduce(log_softmax(logits), axis=0) - np.log(len(logits))
    # A class without votes has probability 0, of whose log numpy warns.
    votes = np.eye(logits.shape[-1])[logits.argmax(axis=-1)]
    with np.errstate(divide="ignore"):
        return np.log(votes.mean(axis=0))


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """Entropy in nats: 0 for a single class, log(classes) for a uniform distribution."""
    # 0 log 0 is 0, and numpy would make NaN of it.
    logs = np.log(np.where(probabilities > 0, probabilities, 1.0))
    return -(probabilities * logs).sum(axis=-1)


def disagreement(logits: np.ndarray) -> np.ndarray:
    """Mutual information of the class and the member, in nats: entropy of the mean of
    probabilities, less the mean of entropies.

    0 if all members agree, however uncertain. Source: Houlsby et al. 2011, arXiv:1112.5745,
    equation 2.
    """
    probabilities = np.exp(log_softmax(logits))
    of_mean = entropy(probabilities.mean(axis=0))
    mean = entropy(probabilities).mean(axis=0)
    # Rounding may leave a difference a little below 0.
    return np.maximum(of_mean - mean, 0.0)


def log_loss(logs: np.ndarray, labels: np.ndarray) -> float:
    """Mean negative log probability of the true class; infinite if that has probability 0."""
    of_labels = np.take_along_axis(logs, labels[..., None], axis=-1)
    return float(-of_labels.mean())


def accuracy(logs: np.ndarray, labels: np.ndarray) -> float:
    """Share of rows whose most probable class is the true one."""
    correct = logs.argmax(axis=-1) == labels
    return float(correct.mean())


def calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Expected calibration error: |confidence - accuracy|, averaged over 15 equal bins of
    confidence, weighted by their rows.

    Source: Guo et al. 2017, arXiv:1706.04599, equation 3.
    """
    confidence = probabilities.max(axis=-1).ravel()
    correct = (probabilities.argmax(axis=-1) == labels).ravel()
    # Bins are open below (Guo et al.), so a confidence of 0.2 belongs to the bin that ends there.
    upper_edges = np.ceil(confidence * BINS).astype(int)
    at = np.clip(upper_edges - 1, 0, BINS - 1)
    gaps = np.bincount(at, weights=confidence - correct, minlength=BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def with_temperature(logs: np.ndarray, temperature: float) -> np.ndarray:
    """Log probabilities divided by the temperature, normalised."""
    if temperature == 1.0:
        return logs
    return log_softmax(logs / temperature)


def fit_temperature(logs: np.ndarray, labels: np.ndarray) -> float:
    """The temperature with the lowest log loss, from 0.02 to 50, by bisection: the loss is convex
    in 1 / temperature.
    """

    def slope(inverse: float) -> float:
        weights = np.exp(log_softmax(logs * inverse))
        # probability 0 adds nothing
        possible_logs = np.where(weights > 0, logs, 0.0)
        expected = (weights * possible_logs).sum(axis=-1)
        of_labels = np.take_along_axis(logs, labels[..., None], axis=-1)[..., 0]
        return float((expected - of_labels).mean())

    low, high = 1 / FLATTEST, 1 / SHARPEST
    # After 60 halvings the interval, at first log(2500), is below the precision of float64.
    for _ in range(60):
        middle = (low * high) ** 0.5
        if slope(middle) > 0:
            high = middle
        else:
            low = middle
    return float(1 / (low * high) ** 0.5)
