//! The choices in a run file of `fsdp init`, and the sizes that follow from model and data.

use std::fmt;
use std::path::Path;

use fsdp_ckpt::is_url;
use fsdp_config::{Device, TokenRef};
use fsdp_data::Survey;
use fsdp_nn::hf::HfConfig;
use fsdp_nn::model::Architecture as _;
use fsdp_train::TrainError;

use crate::error::CliError;

/// Samples per step, unless the data has too few.
const GLOBAL_BATCH: usize = 16;
/// Tokens per sample, unless the model supports fewer: most machines lack the memory for activations of longer ones.
const SEQ_LEN_GPU: usize = 2048;
const SEQ_LEN_CPU: usize = 512;
/// Minimum tokens per sample: shorter ones teach nothing about sentences.
const SEQ_LEN_MIN: usize = 16;
/// Steps of a run: fewer end before the warm-up has any effect; more should be the user's decision.
const STEPS_MIN: u64 = 20;
const STEPS_MAX: u64 = 20_000;
/// Models with fewer parameters use larger learning rates when trained from scratch.
const SMALL_MODEL: usize = 100_000_000;
/// Rank of adapters, unless the model is narrower.
const ADAPTER_RANK: usize = 16;
/// Vocabulary size of a byte-level model.
const BYTES: usize = 256;

/// What to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Training {
    /// All pretrained weights.
    Whole,
    /// Adapters; the pretrained weights are frozen.
    Adapters,
    /// Adapters; the pretrained weights are frozen, in 4 bits.
    Quantized,
    /// Random weights, from scratch.
    New,
}

impl Training {
    const NAMES: [(&str, Training); 4] = [
        ("whole", Training::Whole),
        ("lora", Training::Adapters),
        ("qlora", Training::Quantized),
        ("scratch", Training::New),
    ];

    /// Parses an answer.
    pub(super) fn parse(answer: &str) -> Result<Training, &'static str> {
        let named = Self::NAMES.iter().find(|(name, _)| *name == answer);
        named.map(|(_, training)| *training).ok_or("answer whole, lora, qlora or scratch")
    }

    /// Whether adapters are trained.
    pub(super) fn has_adapters(self) -> bool {
        matches!(self, Training::Adapters | Training::Quantized)
    }

    /// Steps of a run, if an epoch has `epoch` steps: three epochs for pretrained weights, one for new ones.
    pub(super) fn steps(self, epoch: u64) -> u64 {
        let epochs = if self == Training::New { 1 } else { 3 };
        epoch.saturating_mul(epochs).clamp(STEPS_MIN, STEPS_MAX)
    }
}

impl fmt::Display for Training {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Self::NAMES.iter().find(|(_, training)| training == self);
        f.write_str(named.map_or("", |(name, _)| name))
    }
}

/// The contents of a run file.
#[derive(Clone, Debug)]
pub(super) struct Choices {
    pub(super) model: String,
    pub(super) training: Training,
    /// Maximum tokens per sample that the model supports.
    pub(super) positions: usize,
    /// The class of its layers.
    pub(super) layer_class: Option<String>,
    /// Rank of adapters.
    pub(super) adapter_rank: usize,
    pub(super) lr: f64,
    pub(super) train: Vec<String>,
    pub(super) eval: Vec<String>,
    pub(super) format: Option<String>,
    pub(super) column: Option<String>,
    pub(super) tokenizer: String,
    /// Whether text would be tokenized differently than for the pretrained weights.
    pub(super) lacks_tokenizer: bool,
    /// Whether the data has prompts, which are excluded from the loss.
    pub(super) has_prompts: bool,
    /// The separator of texts, if the tokenizer adds none.
    pub(super) separator: Option<TokenRef>,
    pub(super) seq_len: usize,
    pub(super) global_batch: usize,
    pub(super) steps: u64,
    /// Approximate steps per epoch, if they can be estimated.
    pub(super) epoch_steps: Option<u64>,
    pub(super) device: Device,
    pub(super) ranks: usize,
    pub(super) out_dir: String,
}

impl Choices {
    /// The choices that follow from the model, before the data is known.
    ///
    /// # Errors
    /// [`CliError`]: the model's description contradicts itself.
    pub(super) fn new(
        model: String,
        config: &HfConfig,
        training: Training,
        out_dir: String,
    ) -> Result<Choices, CliError> {
        let built = config.build().map_err(TrainError::from)?;
        let spec = &built.description().spec;
        let is_numbered =
            |fqn: &str| fqn.rsplit('.').next().is_some_and(|last| last.parse::<usize>().is_ok());
        // Parents come first, so this is a layer and not an expert in it.
        let layer = spec.modules.iter().find(|module| is_numbered(&module.fqn));
        let lr = match training {
            Training::Whole => 2e-5,
            Training::Adapters | Training::Quantized => 2e-4,
            Training::New if spec.elements() < SMALL_MODEL => 1e-3,
            Training::New => 3e-4,
        };
        let sizes = config.summary();
        let linears = built.description().linears.iter();
        let widest = linears.map(|(_, linear)| linear.inputs.min(linear.outputs)).max();
        let tokenizer = Path::new(&model).join("tokenizer.json");
        let has_tokenizer = !is_url(&model) && tokenizer.exists();
        Ok(Choices {
            training,
            positions: sizes.positions,
            layer_class: layer.map(|layer| layer.class.clone()),
            adapter_rank: ADAPTER_RANK.min(widest.unwrap_or(ADAPTER_RANK)),
            lr,
            train: Vec::new(),
            eval: Vec::new(),
            format: None,
            column: None,
            tokenizer: if has_tokenizer { tokenizer.display().to_string() } else { "bytes".to_owned() },
            lacks_tokenizer: !has_tokenizer && training != Training::New && sizes.vocab != BYTES,
            has_prompts: false,
            separator: None,
            seq_len: SEQ_LEN_MIN,
            global_batch: 1,
            steps: 1,
            epoch_steps: None,
            device: Device::Cpu,
            ranks: 1,
            model,
            out_dir,
        })
    }

    /// Chooses sizes for the surveyed data: the usual ones, or smaller ones so that it fills at least one global batch.
    pub(super) fn fit(&mut self, found: Option<Survey>) {
        let longest = if self.device == Device::Cuda { SEQ_LEN_GPU } else { SEQ_LEN_CPU };
        self.seq_len = longest.min(self.positions);
        let mut rounds = previous_power_of_two(GLOBAL_BATCH / self.ranks);
        if let Some(Survey { about_tokens, has_prompts, .. }) = found {
            self.has_prompts = has_prompts;
            // Half of the estimate, for safety.
            let samples = |seq_len: usize| about_tokens / 2 / seq_len as u64;
            while self.seq_len / 2 >= SEQ_LEN_MIN && samples(self.seq_len) < self.ranks as u64 {
                self.seq_len /= 2;
            }
            while rounds > 1 && samples(self.seq_len) < (rounds * self.ranks) as u64 {
                rounds /= 2;
            }
            let per_step = (rounds * self.ranks * self.seq_len) as u64;
            self.epoch_steps = Some((about_tokens / per_step).max(1));
        }
        self.global_batch = rounds * self.ranks;
    }
}

/// The largest power of two that is not larger; 1 for 0.
fn previous_power_of_two(number: usize) -> usize {
    1 << number.max(1).ilog2()
}
