"""The groups of the data: documents and shards, duplicates, tokenizers; blends and warm-ups."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from pipeline.knobs import knob

#: What train_tokenizer can train.
TOKENIZER_KINDS = ("bpe", "unigram", "wordpiece")


@dataclass
class CorpusConfig:
    """One corpus of data.blend."""

    weight: float | None = knob(None, "its share of the samples relative to the others' weights; 1 when unset", at_least=0)
    tokens: str | None = knob(None, "folder of its token shards; data.tokens when unset")
    corpus: str | None = knob(None, "its name in that folder's manifest; its name in the blend when unset")
    max_epochs: float | None = knob(None, "refuse a run that would read it more often than this", unit="epochs", above=0)


@dataclass
class PhaseConfig:
    """Weights that hold for a part of the run."""

    until_tokens: int | None = knob(None, "tokens of the run after which the next phase begins; unset in the last", at_least=1)
    weights: dict[str, float] = knob({}, "corpus -> its share relative to the others'; corpora that are not named have none")


@dataclass
class InfillConfig:
    """Fill-in-the-middle (Bavarian et al. 2022): a share of the documents is put together anew with its middle last."""

    rate: float = knob(0.0, "share of the documents within a training sample; 0 leaves all as they are", at_least=0, at_most=1)
    spm_rate: float = knob(
        0.5, "share of these in the order suffix, prefix, middle; the rest is prefix, suffix, middle", at_least=0, at_most=1
    )
    prefix: str = knob("<|fim_prefix|>", "special token before the prefix")
    middle: str = knob("<|fim_middle|>", "special token before the middle")
    suffix: str = knob("<|fim_suffix|>", "special token before the suffix")


@dataclass
class MaskingConfig:
    """Masked language models (Devlin et al. 2019): which tokens of a sequence a model has to guess, and what it sees in their place."""

    rate: float = knob(0.15, "share of the tokens of a sequence that are to be guessed", above=0, at_most=1)
    random: float = knob(0.1, "share of these that become a random token", at_least=0, at_most=1)
    keep: float = knob(0.1, "share of these that stay as they are; the rest becomes the mask", at_least=0, at_most=1)
    mask: str | None = knob(None, "special token for what is to be guessed; [MASK] or <mask> of the tokenizer when unset")
    first: str | None = knob(None, "special token before a sequence; [CLS] or <s> of the tokenizer when unset")
    between: str | None = knob(None, "special token after each segment; [SEP] or </s> of the tokenizer when unset")


@dataclass
class SpansConfig:
    """Span corruption (Raffel et al. 2020): which tokens of a text the encoder does not see and the decoder writes."""

    rate: float = knob(0.15, "share of the tokens that are taken out", above=0, at_most=0.5)
    mean_length: float = knob(3.0, "mean length of the spans in which they stand", unit="tokens", at_least=2)
    sentinel: str = knob("<extra_id_*>", "special tokens that stand for the spans; * is 0, 1, ...")


@dataclass
class PairsConfig:
    """Pairs of a source, which the encoder reads, and a target, which the decoder writes: translation, summaries."""

    train: list[str] = knob([], "files to train on: .tsv (source, tab, target), or .jsonl")
    validation: list[str] = knob([], "files to validate on")
    source: str = knob("source", "field of a JSON record that holds the source")
    target: str = knob("target", "field of a JSON record that holds the target")


@dataclass
class WarmupConfig:
    """A value that holds until a step."""

    until_step: int = knob(MISSING, "first step (counted from 0) with the next value", unit="steps", at_least=1)
    value: int = knob(MISSING, "the value before it", at_least=1)


@dataclass
class DataConfig:
    """Documents, text shards and token shards."""

    input: list[str] = knob([], "files, globs, folders or fsspec URLs with raw documents: the corpus called default")
    corpora: dict[str, list[str]] = knob({}, "further corpora, kept apart for blending: {name: [files, globs, folders or URLs], ...}")
    text_field: str = knob("text", "field of a JSON record, or column of a Parquet file, that holds the document")
    suffixes: list[str] = knob(
        [], "endings of the file names that count as documents in a folder; when empty, of every form that can be read"
    )
    exclude: list[str] = knob([".*"], "names (globs) of files and folders that are left out wherever a folder or glob is searched")
    document_megabytes: float = knob(
        16.0, "largest document, as it stands in its file; larger ones are quarantined", unit="MB", above=0, at_most=2000
    )
    main_content: bool = knob(True, "keep of a web page its main content alone, without navigation, headers and footers")
    shards: str = knob("work/shards", "folder of the text shards (written by shard)")
    tokens: str = knob("work/tokens", "folder of the token shards (written by tokenize)")
    seed: int = knob(0, "seed of the one document shuffle and of the train/validation split", at_least=0)
    part_megabytes: float | None = knob(
        None,
        "input that a rank reads, cleans and notes as done at a time; a thousandth of all, from 4 to 256, when unset",
        unit="MB",
        above=0,
    )
    shard_megabytes: float = knob(128.0, "text per shard, about; a rank holds one in memory", unit="MB", above=0, at_most=2000)
    validation_fraction: float = knob(0.005, "share of the documents kept for validation", at_least=0, at_most=0.5)
    documents_per_member: int = knob(1, "documents that share a member of a text shard; more saves space with short ones", at_least=1)
    quarantine_limit: float = knob(0.01, "largest share of documents that may be unreadable before shard gives up", at_least=0, at_most=1)
    blend: dict[str, CorpusConfig] = knob(
        {}, "name -> corpus that training samples come from; empty takes all of data.tokens, each window once an epoch", item=CorpusConfig
    )
    blend_weights: str = knob(
        "samples", "what weights compare: shares of the samples, or epochs of the corpora", choices=("samples", "epochs")
    )
    phases: list[PhaseConfig] = knob([], "weights of the blend by tokens seen; empty keeps data.blend's own throughout", item=PhaseConfig)
    packing: str = knob(
        "windows",
        "how training samples are cut: windows of the stream, or whole documents packed best-fit (indexed at the start)",
        choices=("windows", "best_fit"),
    )
    infill: InfillConfig = field(default_factory=InfillConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    spans: SpansConfig = field(default_factory=SpansConfig)
    pairs: PairsConfig = field(default_factory=PairsConfig)
    decoder_start: str | None = knob(
        None, "special token that an encoder-decoder's decoder reads first, and padding; <pad> or [PAD] of the tokenizer when unset"
    )
    verify: str = knob(
        "lazy",
        "compare token shards with their checksums: never, in the background when first read, or all before the start; "
        "the ranks share the work",
        choices=("off", "lazy", "all"),
    )
    prefetch: int = knob(4, "batches that a rank makes ready ahead, a thread each", at_least=1, at_most=64)


@dataclass
class DedupConfig:
    """Which documents say the same, and go. The best document of a cluster stays."""

    exact: bool = knob(True, "drop documents whose text another one has")
    near: bool = knob(True, "drop documents that resemble another one (MinHash)")
    threshold: float = knob(0.8, "Jaccard index of two documents' shingles from which they are duplicates", above=0, at_most=1)
    shingle: int = knob(5, "length of a shingle", unit="words", at_least=1, at_most=100)
    bands: int = knob(16, "bands of a signature; documents that share a whole one are compared", at_least=1, at_most=1024)
    rows: int = knob(8, "places of a band; a signature has bands x rows", at_least=1, at_most=1024)
    url: bool = knob(False, "drop documents whose URL another one has (url_field), but for scheme, www., port, fragment and last slash")
    url_field: str = knob("url", "field of a document's metadata that holds its URL")
    paragraphs: bool = knob(False, "remove lines that occurred before, anywhere in the corpus")
    paragraph_characters: int = knob(50, "shortest line that dedup.paragraphs removes", unit="characters", at_least=1)
    against: list[str] = knob([], "text-shard folders with saved signatures; what they hold is dropped here")
    save_signatures: bool = knob(False, "keep signatures beside the shards, for dedup.against (16 + 4 x bands x rows bytes a document)")

    @property
    def permutations(self) -> int:
        """Places of a signature."""
        return self.bands * self.rows


@dataclass
class TokenizerConfig:
    """The tokenizer, trained by train_tokenizer or brought along."""

    path: str = knob("work/tokenizer", "Hugging Face tokenizer folder (written by train_tokenizer)")
    source: str | None = knob(
        None, "file to import instead of training: NAME.tiktoken (split by tokenizer.split and digits), or SentencePiece's NAME.model"
    )
    kind: str = knob("bpe", "what to train: BPE over bytes, Unigram as in SentencePiece, or BERT's WordPiece", choices=TOKENIZER_KINDS)
    vocab_size: int = knob(8192, "entries to train, special tokens included", unit="tokens", at_least=257)
    vocab_sizes: list[int] = knob([], "several sizes in one run instead of vocab_size, each written to path/SIZE", unit="tokens")
    train_megabytes: float = knob(100.0, "text to learn from, taken evenly over the training shards", unit="MB", above=0)
    balance: float = knob(
        1.0, "weight of languages in that text: their share to this power; 1 as they come, 0 all equal", at_least=0, at_most=1
    )
    split: str = knob("gpt2", "how BPE cuts text into words: as GPT-2, or as Llama 3", choices=("gpt2", "llama3"))
    digits: str = knob(
        "keep", "numbers: as the split has it, one digit a token at most, or three", choices=("keep", "single", "groups_of_three")
    )
    whitespace: str = knob(
        "learned", "runs of spaces, tabs and line ends: learned as words are, or 2 to 16 of them an entry each", choices=("learned", "runs")
    )
    end_of_document: str = knob("<|endoftext|>", "special token written after every document")
    special_tokens: list[str] = knob([], "further special tokens, for later use")
    report: bool = knob(True, "measure the tokenizer on the validation split (report.json and report.html beside it)")
    compare: list[str] = knob([], "Hugging Face tokenizer folders that the report sets beside it")
    engine: str = knob(
        "auto",
        "what tokenizes: Hugging Face tokenizers, or fastokens, checked against it on every rank; auto takes fastokens where it can",
        choices=("auto", "fastokens", "huggingface"),
    )
