"""Configuration groups of the data: documents and shards, deduplication, tokenizers, blends and warm-ups."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from pipeline.common.knobs import knob

#: Tokenizer models that train_tokenizer can train.
TOKENIZER_KINDS = ("bpe", "unigram", "wordpiece")
#: The default of data.decoder_start: the first of these that the tokenizer has.
DECODER_STARTS = ("<pad>", "[PAD]")


@dataclass(frozen=True)
class CorpusConfig:
    """A corpus of data.blend."""

    weight: float | None = knob(None, "sampling weight, relative to the other corpora; default 1", at_least=0)
    tokens: str | None = knob(None, "folder or fsspec URL with the token shards of the corpus; default data.tokens")
    corpus: str | None = knob(None, "name of the corpus in the manifest of that folder; default: its name in the blend")
    max_epochs: float | None = knob(None, "maximum number of epochs; a run that would exceed it is refused", unit="epochs", above=0)


@dataclass(frozen=True)
class PhaseConfig:
    """Sampling weights of one phase of the run."""

    until_tokens: int | None = knob(None, "number of training tokens at which the next phase begins; unset in the last phase", at_least=1)
    weights: dict[str, float] = knob({}, "corpus -> sampling weight; corpora that are not listed have weight 0")
    run: int = knob(1, "samples in a row of one corpus: those of a sequence of training.phases", unit="samples", at_least=1)


@dataclass(frozen=True)
class TrainingPhaseConfig:
    """A phase of training. What it does not set is as in the phase before."""

    until_step: int | None = knob(None, "first step (counted from 0) of the next phase; unset in the last phase", at_least=1)
    until_tokens: int | None = knob(None, "training tokens at which the next phase begins, in place of until_step", at_least=1)
    sequence_length: int | None = knob(None, "tokens per sequence, a multiple of that of the first phase", unit="tokens", at_least=2)
    global_batch_size: int | None = knob(None, "sequences per optimizer step, over all ranks", unit="sequences", at_least=1, at_most=10**7)
    nodes: int | None = knob(None, "nodes of a job in this phase; in the first one, the default is cluster.nodes", unit="nodes", at_least=1)
    weights: dict[str, float] = knob({}, "corpus of data.blend -> sampling weight; corpora that are not listed have weight 0")
    overrides: list[str] = knob([], 'other settings, such as "model.rope_theta=500000", each in quotes')


@dataclass(frozen=True)
class InfillConfig:
    """Fill-in-the-middle (Bavarian et al. 2022): a fraction of the documents is reordered so that the middle comes last."""

    rate: float = knob(
        0.0, "fraction of the documents of a training sample that are transformed; 0 disables fill-in-the-middle", at_least=0, at_most=1
    )
    spm_rate: float = knob(
        0.5, "fraction of these in suffix-prefix-middle order; the others are in prefix-suffix-middle order", at_least=0, at_most=1
    )
    prefix: str = knob("<|fim_prefix|>", "special token before the prefix")
    middle: str = knob("<|fim_middle|>", "special token before the middle")
    suffix: str = knob("<|fim_suffix|>", "special token before the suffix")


@dataclass(frozen=True)
class MaskingConfig:
    """Masked language modeling (Devlin et al. 2019): which tokens are prediction targets, and what replaces them in the input."""

    rate: float = knob(0.15, "fraction of the tokens of a sequence that are prediction targets", above=0, at_most=1)
    random: float = knob(0.1, "fraction of the targets replaced by a random token", at_least=0, at_most=1)
    keep: float = knob(0.1, "fraction of the targets left unchanged; the others are replaced by the mask token", at_least=0, at_most=1)
    mask: str | None = knob(None, "mask token; default: [MASK] or <mask> of the tokenizer")
    first: str | None = knob(None, "special token before each sequence; default: [CLS] or <s> of the tokenizer")
    between: str | None = knob(None, "special token after each segment; default: [SEP] or </s> of the tokenizer")


@dataclass(frozen=True)
class SpansConfig:
    """Span corruption (Raffel et al. 2020): sentinels replace spans in the encoder input; the decoder predicts the spans."""

    rate: float = knob(0.15, "fraction of the tokens that are replaced", above=0, at_most=0.5)
    mean_length: float = knob(3.0, "mean span length", unit="tokens", at_least=2)
    sentinel: str = knob("<extra_id_*>", "sentinel tokens; * stands for 0, 1, ...")


@dataclass(frozen=True)
class PairsConfig:
    """Sequence-to-sequence pairs (translation, summarization): the source is the encoder input, the target is predicted by the decoder."""

    train: list[str] = knob([], "training files: .tsv (source, tab, target) or .jsonl")
    validation: list[str] = knob([], "validation files: .tsv or .jsonl")
    source: str = knob("source", "field of a JSON record with the source")
    target: str = knob("target", "field of a JSON record with the target")


@dataclass(frozen=True)
class InstructionsConfig:
    """Prompts and chats with answers, or texts with labels, for fine-tuning."""

    train: list[str] = knob(
        [],
        'files of JSON lines or Parquet: {"messages": [...]} for the chat template, ShareGPT, Alpaca, {"prompt": TEXT, "completion": '
        'TEXT}; dpo: {"prompt": ..., "chosen": ..., "rejected": ...}; classification: {"text": TEXT, "label": TEXT}',
    )
    validation: list[str] = knob([], "validation files: JSON lines or Parquet")
    tokens: str | None = knob(
        None,
        "folder of packed examples: stage=tokenize writes the lines of train and validation to it once, in parallel, for the objective and "
        "sequence length of the training group, and finetune reads it instead of them; default: every rank tokenizes the files",
    )
    reference: str | None = knob(
        None,
        "dpo: folder of the log-probabilities of the reference, which the first run computes with the weights that it begins with, and "
        "later ones read; default: run_dir/reference if all weights are trained; none with adapters, the model without them computes them",
    )
    pack: bool = knob(True, "put several examples into a sequence, separated by a document mask")
    repair: bool = knob(
        False,
        "chats: leave out answers before the first question, and join messages of one role in a row with a blank line; the log counts both",
    )
    labels: list[str] = knob([], "classification: the labels; default: those of the checkpoint, or of the training files")
    too_long: str = knob(
        "truncate",
        "examples that are longer than training.sequence_length: cut at the end (truncate), left out (drop), or unusable lines (refuse); "
        "the log counts them",
        choices=("truncate", "drop", "refuse"),
    )


@dataclass(frozen=True)
class WarmupConfig:
    """A value that applies before a given step."""

    until_step: int = knob(MISSING, "first step (counted from 0) that uses the next value", unit="steps", at_least=1)
    value: int = knob(MISSING, "value for the steps before it", at_least=1)


@dataclass(frozen=True)
class RampupConfig(WarmupConfig):
    """A global batch size that applies before a given step, and the nodes of a job in these steps."""

    nodes: int | None = knob(None, "nodes of a job in the steps before it; default: cluster.nodes", unit="nodes", at_least=1)


@dataclass(frozen=True)
class ScheduledWeight:
    """A weight that applies before a given step."""

    until_step: int = knob(MISSING, "first step (counted from 0) that uses the next value", unit="steps", at_least=1)
    value: float = knob(MISSING, "value for the steps before it", at_least=0)


@dataclass(frozen=True)
class DataConfig:
    """Documents, text shards and token shards."""

    input: list[str] = knob([], "files, globs, folders or fsspec URLs with raw documents of the corpus named default")
    corpora: dict[str, list[str]] = knob(
        {}, "additional corpora, stored separately for blending: {name: [files, globs, folders or URLs], ...}"
    )
    text_field: str = knob("text", "field of a JSON record, or column of a Parquet file, with the text of the document")
    suffixes: list[str] = knob([], "file name suffixes to read, unknown ones as text; empty reads all supported formats")
    exclude: list[str] = knob([".*"], "glob patterns of file and folder names to skip when a folder or glob is searched")
    document_megabytes: float = knob(
        16.0, "maximum size of a document in its file; larger documents are quarantined", unit="MB", above=0, at_most=2000
    )
    main_content: bool = knob(True, "extract the main content of web pages, without navigation, headers and footers")
    shards: str = knob("work/shards", "folder of the text shards (output of stage=shard)")
    tokens: str = knob("work/tokens", "folder or fsspec URL of the token shards (output of stage=tokenize)")
    select: str | None = knob(
        None,
        "condition on the fields of the documents that stage=tokenize reads, in Python's syntax: score_rank >= 0.9 and lang == 'de'. "
        "score_rank, of 0, 0.01, ... 0.99, is the part of the documents of its language that have a lower score; default: all documents",
    )
    seed: int = knob(0, "seed of the document shuffle and of the train/validation split", at_least=0, at_most=10**18)
    part_megabytes: float | None = knob(
        None,
        "size of an input part, the unit of work and of resumption; default: 1/1000 of the input, between 4 and 256",
        unit="MB",
        at_least=0.001,
    )
    shard_megabytes: float = knob(128.0, "approximate text size of a shard", unit="MB", above=0, at_most=2000)
    validation_fraction: float = knob(0.005, "fraction of the documents in the validation split; 1: all but one", at_least=0, at_most=1)
    documents_per_member: int = knob(
        1, "documents per tar member of a text shard; values above 1 save space for short documents", at_least=1
    )
    quarantine_limit: float = knob(
        0.01, "maximum fraction of the input, or of data.instructions, that is unusable; above it the stage fails", at_least=0, at_most=1
    )
    sample: float = knob(
        1.0, "fraction of the documents that stage=shard reads, chosen by their identity: to try settings", above=0, at_most=1
    )
    compare: str | None = knob(None, "folder of shards of the same input made with other settings, beside which report.html shows these")
    save_dropped: bool = knob(False, "write every dropped document with the step, the reason and its text to dropped.jsonl.zst")
    blend: dict[str, CorpusConfig] = knob(
        {}, "corpus name -> corpus to sample from; empty reads each window of data.tokens once per epoch", item=CorpusConfig
    )
    blend_weights: str = knob(
        "samples", "interpretation of the weights: fractions of the samples, or relative numbers of epochs", choices=("samples", "epochs")
    )
    phases: list[PhaseConfig] = knob(
        [], "schedule of sampling weights by training tokens; empty uses the weights of data.blend for the full run", item=PhaseConfig
    )
    packing: str = knob(
        "windows",
        "construction of training samples: windows of the token stream, or best-fit packing of full documents (indexed at start-up)",
        choices=("windows", "best_fit"),
    )
    teacher: str | None = knob(
        None,
        "folder with what a teacher predicts for the samples of this run (stage=evaluate stage.distill): the loss has the divergence from "
        "it with training.teacher_weight",
    )
    remove: str | None = knob(
        None,
        "file with documents that the run leaves out from here on (stage.out of stage=ledger): their tokens are read as end-of-document "
        "tokens without a target; the run keeps them in run_dir/removed.jsonl for later starts and forks",
    )
    infill: InfillConfig = field(default_factory=InfillConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    spans: SpansConfig = field(default_factory=SpansConfig)
    pairs: PairsConfig = field(default_factory=PairsConfig)
    instructions: InstructionsConfig = field(default_factory=InstructionsConfig)
    decoder_start: str | None = knob(None, "start token of the decoder, also used as padding; default: <pad> or [PAD] of the tokenizer")
    verify: str = knob(
        "lazy",
        "checksum verification of token shards: never (off), in the background at the first read (lazy), or before training (all); "
        "distributed over the ranks",
        choices=("off", "lazy", "all"),
    )
    stage_in: str | None = knob(
        None,
        "folder on storage of the nodes, such as /tmp or $TMPDIR, to which the token shards are copied before training, once a node; "
        "default: they are read where they are; those of a URL need it",
    )
    prefetch: int = knob(4, "batches prefetched per rank, one thread each", at_least=1, at_most=64)


@dataclass(frozen=True)
class DedupConfig:
    """Deduplication. The longest document of each cluster of duplicates is kept."""

    exact: bool = knob(True, "drop exact duplicates")
    near: bool = knob(True, "drop near duplicates (MinHash)")
    threshold: float = knob(0.8, "minimum Jaccard index of the shingles of two near duplicates", above=0, at_most=1)
    shingle: int = knob(5, "shingle length", unit="words", at_least=1, at_most=100)
    bands: int = knob(16, "bands per signature; documents with an identical band are candidates", at_least=1, at_most=1024)
    rows: int = knob(8, "rows per band; a signature has bands x rows values", at_least=1, at_most=1024)
    url: bool = knob(False, "drop documents with the same URL (dedup.url_field), ignoring scheme, www., port, fragment and trailing slash")
    url_field: str = knob("url", "metadata field with the URL of a document")
    paragraphs: bool = knob(False, "remove lines that occur earlier in the corpus")
    paragraph_characters: int = knob(50, "minimum length of a line removed by dedup.paragraphs", unit="characters", at_least=1)
    spans: int | None = knob(
        None, "remove runs of at least so many words that occur earlier in the corpus, such as 50", unit="words", at_least=8, at_most=1000
    )
    span_megabytes: float = knob(512.0, "memory of a rank in which dedup.spans compares", unit="MB", at_least=1)
    against: list[str] = knob([], "text shard folders with saved signatures; their documents (with dedup.spans: and spans) are removed")
    save_signatures: bool = knob(False, "save signatures next to the shards, for dedup.against (16 + 4 x bands x rows bytes per document)")

    @property
    def permutations(self) -> int:
        """Number of values of a signature."""
        return self.bands * self.rows


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer: trained by train_tokenizer, or an existing one."""

    path: str = knob(
        "work/tokenizer",
        "Hugging Face tokenizer folder (output of stage=train_tokenizer); unset (auto): that of the run in run_dir, or of the imported "
        "model that it started from, if there is one",
    )
    source: str | None = knob(
        None,
        "file to import instead of training: NAME.tiktoken (pre-tokenized by tokenizer.split and digits) or NAME.model (SentencePiece)",
    )
    kind: str = knob(
        "bpe", "tokenizer model to train: byte-level BPE, Unigram (SentencePiece) or WordPiece (BERT)", choices=TOKENIZER_KINDS
    )
    vocab_size: int = knob(8192, "vocabulary size, including special tokens", unit="tokens", at_least=257, at_most=10**7)
    vocab_sizes: list[int] = knob(
        [], "train several vocabulary sizes instead of vocab_size; each is written to path/SIZE", unit="tokens", at_most=10**7
    )
    train_megabytes: float = knob(100.0, "size of the training sample, drawn evenly from the training shards", unit="MB", above=0)
    balance: float = knob(
        1.0, "exponent of the language fractions in the sample: 1 keeps the distribution, 0 makes it uniform", at_least=0, at_most=1
    )
    parity: dict[str, str] = knob(
        {},
        "bpe: text files with a line for each line of the others, by language: {de: deu.txt, en: eng.txt}. Every entry is learned from "
        "the documents of the language that needs the most tokens for its file, so that none costs more than others. Documents in other "
        "languages are left out",
    )
    split: str = knob("gpt2", "pre-tokenization of BPE: GPT-2 or Llama 3", choices=("gpt2", "llama3"))
    digits: str = knob(
        "keep",
        "numbers: split as in tokenizer.split (keep), into single digits, or into groups of three digits",
        choices=("keep", "single", "groups_of_three"),
    )
    whitespace: str = knob(
        "learned",
        "runs of spaces, tabs and newlines: learned, or one vocabulary entry for each run of 2 to 16 characters",
        choices=("learned", "runs"),
    )
    end_of_document: str = knob(
        "<|endoftext|>", "special token appended to every document; unset (auto): that of the run, or eos_token of the tokenizer's folder"
    )
    bos: str = knob(
        "auto",
        "the beginning-of-sequence token before every document, and before prompts: that of the tokenizer (document), none, or as the run "
        "and its tokens have it, and otherwise as the post-processor of the tokenizer does (auto)",
        choices=("auto", "document", "none"),
    )
    spelled: str = knob(
        "text",
        "what prompts, completions, labeled texts and stage.tasks that spell a special token have: its characters (text), or the token, as "
        "in transformers (token); documents and pairs of texts always have its characters, and chats the token",
        choices=("text", "token"),
    )
    special_tokens: list[str] = knob([], "additional special tokens")
    chat_template: str | None = knob(
        None,
        "template of chats: chatml, deepseek, glm, gpt_oss, llama3, phi3, qwen3, plain (without special tokens), or a Jinja file; default: "
        "that of the tokenizer",
    )
    report: bool = knob(True, "measure the tokenizer on the validation split; writes report.json and report.html to its folder")
    compare: list[str] = knob([], "Hugging Face tokenizer folders to include in the report for comparison")
    engine: str = knob(
        "auto",
        "Hugging Face tokenizers, or fastokens, verified against it on every rank; auto uses fastokens if its output is identical",
        choices=("auto", "fastokens", "huggingface"),
    )
