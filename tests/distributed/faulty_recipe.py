"""The text classification recipe, of which rank HF_DIST_FAULTY_RANK does HF_DIST_FAULT in step 3."""

import functools
import os
import signal
import time

import torch

FAULT = os.environ["HF_DIST_FAULT"]


def spoil(forward):
    calls = []

    # The Trainer reads the names that forward takes.
    @functools.wraps(forward)
    def run(*args, **kwargs):
        # The probe of the loss runs two more.
        calls.append(1)
        if len(calls) == 7:
            if FAULT == "hang":
                time.sleep(3600)
            os.kill(os.getpid(), {"die": signal.SIGKILL, "freeze": signal.SIGSTOP}[FAULT])
        return forward(*args, **kwargs)

    return run


if __name__ == "__main__":
    from transformers import BertForSequenceClassification

    from recipes.text_classification import main

    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first and os.environ["RANK"] == os.environ["HF_DIST_FAULTY_RANK"]:
        BertForSequenceClassification.forward = spoil(BertForSequenceClassification.forward)
    torch.set_num_threads(1)
    main()
