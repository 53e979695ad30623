//! The faults that are tried: each is a step computed with an error planted.

use fsdp_nn::op::LossTerms;

use super::Variant;
use super::batch::{Documents, Labels, MicroBatch};
use super::report::Cause;
use super::sweep::TiedShare;

/// A step with an error planted.
#[derive(Clone)]
pub(super) struct Trial<'a, A> {
    pub(super) cause: Cause,
    /// What the user reads if this explains the gradient.
    pub(super) text: String,
    /// The size of the fault, if it has one.
    pub(super) factor: Option<f64>,
    pub(super) architecture: &'a A,
    pub(super) terms: LossTerms,
    pub(super) batches: Vec<(MicroBatch, f64)>,
    pub(super) documents: Documents,
    pub(super) hides_padding: bool,
    pub(super) seed: u64,
    pub(super) tied: TiedShare,
    /// Whether the weights are those after the step.
    pub(super) is_after: bool,
    /// Whether the gradient may have any length, because the fault does not determine it.
    pub(super) has_free_factor: bool,
    /// Whether the fault may be planted in part, or several times.
    pub(super) is_share: bool,
}

impl<A> Trial<'_, A> {
    fn planted(&self, cause: Cause, text: &str, plant: impl FnOnce(&mut Self)) -> Self
    where
        Self: Clone,
    {
        let mut trial = Self { cause, text: text.to_owned(), ..self.clone() };
        plant(&mut trial);
        trial
    }
}

/// The step as it should be.
pub(super) fn sound<'a, A>(architecture: &'a A, terms: LossTerms, batches: &[MicroBatch]) -> Trial<'a, A> {
    Trial {
        cause: Cause::Unexplained,
        text: String::new(),
        factor: None,
        architecture,
        terms,
        batches: by_tokens(batches),
        documents: Documents::Given,
        hides_padding: false,
        seed: 0,
        tied: TiedShare::Both,
        is_after: false,
        has_free_factor: false,
        is_share: false,
    }
}

/// All faults that this step could have, those that need no other data first.
pub(super) fn all<'a, A: Clone>(
    sound: &Trial<'a, A>,
    batches: &[MicroBatch],
    variants: &'a [Variant<A>],
    is_tied: bool,
) -> Vec<Trial<'a, A>> {
    let mut trials = Vec::new();
    means_of_means(sound, batches, &mut trials);
    labels(sound, batches, &mut trials);
    if batches.iter().any(MicroBatch::is_packed) {
        let text = "documents that share a row attend to each other, though their positions restart";
        trials.push(sound.planted(Cause::DocumentsAttend, text, |trial| trial.documents = Documents::Joined));
        let text = "documents that share a row attend to each other, and positions do not restart";
        trials
            .push(sound.planted(Cause::DocumentsAttend, text, |trial| trial.documents = Documents::Ignored));
        let text = "positions do not restart with each document";
        trials.push(sound.planted(Cause::Positions, text, |trial| trial.documents = Documents::RunOn));
    } else {
        for parts in [2, 4, 8] {
            let text = format!(
                "positions restart within a text, {parts} times per row, as on ranks that share a row"
            );
            trials
                .push(sound.planted(Cause::Positions, &text, |trial| {
                    trial.documents = Documents::Restarting(parts)
                }));
        }
    }
    if is_tied {
        let text = "the tied weight got only the gradient of the head, not that of the embedding";
        trials.push(sound.planted(Cause::TiedGradientMissing, text, |trial| trial.tied = TiedShare::Head));
        let text = "the tied weight got only the gradient of the embedding, not that of the head";
        trials
            .push(sound.planted(Cause::TiedGradientMissing, text, |trial| trial.tied = TiedShare::Embedding));
    }
    if sound.terms.router_loss != 0.0 {
        let text = "the balancing loss of the routers";
        trials.push(sound.planted(Cause::AuxiliaryLoss, text, |trial| {
            trial.terms.router_loss = 0.0;
            trial.is_share = true;
        }));
    }
    for (text, label_smoothing, z_loss) in [
        ("the loss has no label smoothing", 0.0, sound.terms.z_loss),
        ("the loss has label smoothing (0.1)", 0.1, sound.terms.z_loss),
        ("the loss has no z-loss", sound.terms.label_smoothing, 0.0),
        ("the loss has a z-loss (1e-4)", sound.terms.label_smoothing, 1e-4),
        ("the loss has a z-loss (1e-3)", sound.terms.label_smoothing, 1e-3),
    ] {
        let terms = LossTerms { label_smoothing, z_loss, ..sound.terms };
        if terms != sound.terms {
            trials.push(sound.planted(Cause::ModelDiffers, text, |trial| trial.terms = terms));
        }
    }
    for Variant { text, factor, architecture, .. } in variants.iter().filter(|variant| !variant.is_random) {
        trials.push(sound.planted(Cause::ModelDiffers, text, |trial| {
            (trial.architecture, trial.factor) = (architecture, *factor);
        }));
    }
    let text = "the gradient is that of the weights after the step, not of those before it";
    trials.push(sound.planted(Cause::ModelDiffers, text, |trial| trial.is_after = true));
    missing_micro_batches(sound, batches, &mut trials);
    if batches.len() > 1 {
        doubled(sound, &mut trials);
    }
    trials
}

/// The mean over all counted tokens of the step.
fn by_tokens(batches: &[MicroBatch]) -> Vec<(MicroBatch, f64)> {
    let all: usize = batches.iter().map(MicroBatch::counted).sum();
    batches.iter().map(|batch| (batch.clone(), 1.0 / all.max(1) as f64)).collect()
}

/// How micro-batches may be dealt to ranks: with the micro-batches of each rank one after the other, or in turn.
fn dealt(count: usize) -> impl Iterator<Item = (usize, &'static str, Vec<usize>)> {
    let ranks = (2..count).filter(move |ranks| count.is_multiple_of(*ranks));
    ranks.flat_map(move |ranks| {
        let per_rank = count / ranks;
        [
            (ranks, "one rank after the other", (0..count).map(|index| index / per_rank).collect()),
            (ranks, "in turn", (0..count).map(|index| index % ranks).collect()),
        ]
    })
}

fn means_of_means<'a, A: Clone>(
    sound: &Trial<'a, A>,
    batches: &[MicroBatch],
    trials: &mut Vec<Trial<'a, A>>,
) {
    let counts: Vec<usize> = batches.iter().map(MicroBatch::counted).collect();
    if counts.iter().all(|count| *count == counts[0]) {
        return;
    }
    let with = |groups: usize, group_of: &[usize]| {
        let mut sizes = vec![0; groups];
        counts.iter().zip(group_of).for_each(|(count, group)| sizes[*group] += count);
        let groups = sizes.iter().filter(|size| **size > 0).count();
        batches
            .iter()
            .zip(group_of)
            .map(|(batch, group)| (batch.clone(), 1.0 / (sizes[*group].max(1) * groups) as f64))
            .collect::<Vec<_>>()
    };
    let each: Vec<usize> = (0..batches.len()).collect();
    let text = format!(
        "the loss is the mean of the {} means of micro-batches, which count from {} to {} tokens, not the mean of all tokens",
        batches.len(),
        counts.iter().min().unwrap_or(&0),
        counts.iter().max().unwrap_or(&0)
    );
    trials.push(
        sound.planted(Cause::LossMeanOfMeans, &text, |trial| trial.batches = with(batches.len(), &each)),
    );
    for (ranks, how, group_of) in dealt(batches.len()) {
        let text = format!(
            "the loss is the mean of the means of {ranks} ranks (micro-batches dealt {how}), not the mean of all tokens"
        );
        trials.push(
            sound.planted(Cause::LossMeanOfMeans, &text, |trial| trial.batches = with(ranks, &group_of)),
        );
    }
}

fn labels<'a, A: Clone>(sound: &Trial<'a, A>, batches: &[MicroBatch], trials: &mut Vec<Trial<'a, A>>) {
    let kinds = [
        (Labels::WithPadding, "padding counts in the loss"),
        (Labels::WithPrompts, "tokens with the label -100, such as prompts, count in the loss"),
        (Labels::All, "tokens with the label -100 count in the loss, prompts and padding"),
        (Labels::ShiftedTwice, "labels are shifted twice: each token predicts the one after the next"),
        (Labels::NotShifted, "labels are not shifted: each token predicts itself"),
        (Labels::WithoutLast, "the last target of each row does not count"),
    ];
    let mut seen: Vec<Vec<MicroBatch>> = vec![batches.to_vec()];
    for (labels, text) in kinds {
        let labelled: Vec<MicroBatch> = batches.iter().map(|batch| batch.labelled(labels)).collect();
        if seen.contains(&labelled) || labelled.iter().all(|batch| batch.counted() == 0) {
            continue;
        }
        let trial = sound.planted(Cause::TokensCounted, text, |trial| trial.batches = by_tokens(&labelled));
        if matches!(labels, Labels::WithPadding | Labels::All) {
            trials.push(trial.planted(Cause::TokensCounted, text, |trial| trial.hides_padding = true));
        }
        trials.push(trial);
        seen.push(labelled);
    }
}

/// One micro-batch counts twice.
fn doubled<'a, A: Clone>(sound: &Trial<'a, A>, trials: &mut Vec<Trial<'a, A>>) {
    for index in 0..sound.batches.len() {
        let text = format!("micro-batch {index} of {} counts twice in the gradient", sound.batches.len());
        trials.push(sound.planted(Cause::GradientScaled, &text, |trial| {
            trial.batches[index].1 *= 2.0;
            trial.has_free_factor = true;
        }));
    }
}

fn missing_micro_batches<'a, A: Clone>(
    sound: &Trial<'a, A>,
    batches: &[MicroBatch],
    trials: &mut Vec<Trial<'a, A>>,
) {
    let count = batches.len();
    let mut only = |text: String, is_there: &dyn Fn(usize) -> bool| {
        trials.push(sound.planted(Cause::GradientMissing, &text, |trial| {
            let kept = trial.batches.iter_mut().enumerate().filter(|(index, _)| !is_there(*index));
            kept.for_each(|(_, (_, weight))| *weight = 0.0);
            trial.has_free_factor = true;
        }));
    };
    if count < 2 {
        return;
    }
    for kept in (0..count).rev() {
        only(format!("only micro-batch {kept} of {count} arrived in the gradient"), &|index| index == kept);
    }
    for (ranks, how, group_of) in dealt(count) {
        let is_last = |index: usize| group_of[index + 1..].iter().all(|group| *group != group_of[index]);
        let text = "of the micro-batches of each rank, only the last one arrived in the gradient";
        only(format!("{text} ({ranks} ranks, dealt {how})"), &is_last);
    }
    for missing in 0..count {
        only(format!("micro-batch {missing} of {count} did not arrive in the gradient"), &|index| {
            index != missing
        });
    }
}
