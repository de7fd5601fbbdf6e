"""Translation: the same text in another language, by an encoder-decoder that generates it."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_dist.config import DataConfig, ModelConfig, option
from hf_dist.data.builtin import seq2seq as builtin_seq2seq
from hf_dist.data.loading import sources
from hf_dist.errors import ConfigError, DataError, nearest
from hf_dist.metrics import load_metric
from hf_dist.tasks.seq2seq.base import Seq2Seq, Seq2SeqSettings
from hf_dist.tasks.seq2seq.encoding import take_texts

logger = logging.getLogger(__name__)

PAIR_COLUMNS = (("source", "target"), ("src", "tgt"), ("source_text", "target_text"), ("input", "output"))
_DICT = "translation"

BleuTokens = Literal["auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"]


@dataclass(frozen=True, kw_only=True)
class TranslationSettings(Seq2SeqSettings):
    """Flags of translation."""

    source_lang: str | None = option(
        None, "Language of the source: a key of the column `translation`, and the tokenizer's code."
    )
    target_lang: str | None = option(None, "Language of the target, likewise.")
    source_column: str | None = option(
        None, "Column (or key of the column `translation`) with the source texts."
    )
    target_column: str | None = option(
        None, "Column (or key of the column `translation`) with the target texts."
    )
    bleu_tokenize: BleuTokens = option(
        "auto", "How sacrebleu splits words for BLEU; auto: 13a, or what suits Chinese, Japanese and Korean."
    )


class Translation(Seq2Seq[TranslationSettings]):
    """Translations, scored by BLEU and chrF against the given ones.

    Attributes:
        pair: the languages, as far as they are known: source and target.
    """

    name = "translation"
    settings_class: ClassVar[type] = TranslationSettings
    best_metric = "bleu"
    example = "self.count = len(names)"

    def __init__(self, settings: TranslationSettings | None = None, *, pad_to_multiple_of: int = 1) -> None:
        super().__init__(settings, pad_to_multiple_of=pad_to_multiple_of)
        self.pair: tuple[str | None, str | None] = (self.settings.source_lang, self.settings.target_lang)
        self._codes: dict[str, str] = {}
        self._marks: frozenset[int] = frozenset()

    # ---- Data ----

    def builtin_splits(self) -> DatasetDict:
        """Python statements and the same in English words."""
        return builtin_seq2seq.spoken_python()

    def builtin_tokenizer(self) -> PreTrainedTokenizerBase:
        """Trained on the training split of the built-in data."""
        return builtin_seq2seq.spoken_python_tokenizer()

    def pairs(self, splits: DatasetDict, *, builtin: bool) -> DatasetDict:
        """The splits with the columns `source` and `target`."""
        if builtin and self.pair == (None, None):
            self.pair = ("python", "english")
        flat = DatasetDict({split: rows.flatten() for split, rows in splits.items()})
        source, target = self._columns(
            next(iter(flat.values())).column_names, needs_target=list(flat) != ["test"]
        )
        if not builtin:
            logger.info("sources from column %s, targets from column %s", source, target)
        flag = "--source_column or --target_column"
        return DatasetDict(
            {
                split: take_texts(rows, split, source=source, target=target, flag=flag)
                for split, rows in flat.items()
            }
        )

    def _columns(self, there: list[str], *, needs_target: bool) -> tuple[str, str | None]:
        """The columns of the source and the target, `translation.de` for the key `de` of `translation`."""
        wanted = (self.settings.source_column, self.settings.target_column)
        by_name = {
            side: _column_of(there, name) or _column_of(there, language)
            for side, name, language in zip(("source", "target"), wanted, self.pair, strict=True)
        }
        for side, name in zip(("source", "target"), wanted, strict=True):
            if name is not None and _column_of(there, name) is None:
                shown = [column.removeprefix(f"{_DICT}.") for column in there]
                raise DataError(
                    f"--{side}_column {name}: there is no such column{nearest(name, shown)}; the data has "
                    f"{', '.join(there)}"
                )
        source, target = by_name["source"], by_name["target"]
        keys = [column for column in there if column.startswith(f"{_DICT}.")]
        if len(keys) == 2 and (source in keys) != (target in keys) and None in self.pair:
            # Two languages, and one of them is named.
            other = keys[1 - keys.index(str(source or target))]
            source, target = source or other, target or other
        if source is None and target is None:
            source, target = _usual_pair(there)
        if source is not None and target is None and not needs_target:
            return source, None
        if source is None or target is None or source == target:
            languages = [str(language) for language in self.pair if language is not None]
            said = f"for the languages {' and '.join(languages)}" if languages else "by the usual names"
            raise DataError(
                f"no two columns of source and target were found {said}; the data has "
                f"{', '.join(there)}: name two of them with --source_column and --target_column, or give "
                "--source_lang and --target_lang"
            )
        return source, target

    # ---- Languages of the tokenizer ----

    def tokenizer(self, data: DataConfig, model: ModelConfig) -> PreTrainedTokenizerBase:
        """As `Task.tokenizer`; a multilingual one is told its languages.

        Raises:
            ConfigError: it needs languages and none are given, or it doesn't know them.
        """
        tokenizer = super().tokenizer(data, model)
        self._codes, self.decoding = {}, {}
        # mBART, mBART-50, NLLB, M2M100, PLBart: they mark a text with its language.
        if hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang"):
            self._set_languages(tokenizer)
        return tokenizer

    def _set_languages(self, tokenizer: Any) -> None:
        known = _language_codes(tokenizer)
        if not known:
            return  # FSMT: a model of one pair, whose texts bear no mark
        for name, flag, language in zip(
            ("src_lang", "tgt_lang"), ("source_lang", "target_lang"), self.pair, strict=True
        ):
            if language is None:
                raise ConfigError(
                    f"{type(tokenizer).__name__} marks texts with their language; give --source_lang and "
                    f"--target_lang, such as {', '.join(list(known)[:3])}"
                )
            self._codes[name] = _code_of(language, known, flag)
            setattr(tokenizer, name, self._codes[name])
        self._marks = frozenset(known.values())
        code = known[self._codes["tgt_lang"]]
        # mBART and PLBart begin a translation with the language as start token, the others force it after.
        starts = type(tokenizer).__name__.startswith(("MBartTokenizer", "PLBart"))
        self.decoding = {"decoder_start_token_id" if starts else "forced_bos_token_id": code}

    def languages(self) -> dict[str, str]:
        """`src_lang`, and `tgt_lang`, of a multilingual tokenizer."""
        return dict(self._codes)

    def texts(self, tokens: Tensor) -> list[str]:
        """Also without languages, which M2M100 doesn't always count as special (transformers 5.24)."""
        if self._marks:
            tokens = tokens.cpu()
            tokens = tokens.masked_fill(
                torch.isin(tokens, torch.tensor(sorted(self._marks))), self.pad_token_id
            )
        return super().texts(tokens)

    # ---- Scores ----

    def measure(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """BLEU and chrF, between 0 and 100."""
        return load_metric("sacrebleu_score").compute(
            predictions=predictions, references=references, tokenize=self.bleu_tokenize()
        )

    def bleu_tokenize(self) -> str:
        """How sacrebleu splits the target language."""
        if self.settings.bleu_tokenize != "auto":
            return self.settings.bleu_tokenize
        language = (self.pair[1] or "").lower().replace("_", "-").partition("-")[0]
        if language in ("zh", "zho", "chinese", "yue"):
            return "zh"
        if language in ("ja", "jpn", "japanese"):
            return "ja-mecab" if importlib.util.find_spec("MeCab") else "char"
        if language in ("ko", "kor", "korean"):
            return "ko-mecab" if importlib.util.find_spec("mecab_ko") else "char"
        return "13a"

    def baseline(self, dataset: Dataset) -> list[str]:
        """The source, left as it is."""
        return list(dataset["source"])


def _column_of(there: list[str], name: str | None) -> str | None:
    """The column of that name, or the key of `translation`; `en_XX` finds `en` too."""
    if name is None:
        return None
    names = [name, f"{_DICT}.{name}"]
    if "_" in name:
        names += [name.partition("_")[0], f"{_DICT}.{name.partition('_')[0]}"]
    return next((found for found in names if found in there), None)


def _usual_pair(there: list[str]) -> tuple[str | None, str | None]:
    for pair in PAIR_COLUMNS:
        source, target = (sources.usual_column(there, (name,)) for name in pair)
        if source is not None and target is not None:
            return source, target
    return None, None


def _language_codes(tokenizer: Any) -> dict[str, int]:
    """The language codes of a multilingual tokenizer -> ids of their tokens."""
    if (ids := getattr(tokenizer, "lang_code_to_id", None)) is not None:
        return dict(ids)
    # NLLB has a list of special tokens only.
    codes = [str(token) for token in tokenizer.extra_special_tokens]
    return {code: tokenizer.convert_tokens_to_ids(code) for code in codes}


def _code_of(language: str, known: dict[str, int], flag: str) -> str:
    """The tokenizer's code of a language: itself, or the only code that begins with it."""
    if language in known:
        return language
    # `en_XX`, `eng_Latn`; PLBart: `__python__`
    bare = {code: code.strip("_") for code in known}
    alike = [code for code, name in bare.items() if language in (name, name.partition("_")[0])]
    if len(alike) == 1:
        return alike[0]
    some = ", ".join(alike or sorted(known)[:5])
    raise ConfigError(
        f"--{flag} {language}: the tokenizer has {'several codes' if alike else 'no code'} for it"
        f"{nearest(language, known)}; expected one of {some}{'' if alike else ' ...'} (name the data's "
        "column with --source_column or --target_column)"
    )
