//! The faults that are tried: each is a step computed with an error planted.

use fsdp_core::DType;
use fsdp_nn::op::LossTerms;

use super::batch::{Documents, Labels, MicroBatch};
use super::report::{Cause, number};
use super::sweep::{Computation, TiedShare};
use super::variant::{Between, Setting};

/// A step with an error planted.
#[derive(Clone)]
pub(super) struct Trial<A> {
    pub(super) cause: Cause,
    /// What the user reads if this explains the gradient.
    pub(super) text: String,
    /// The size of the fault, if it has one.
    pub(super) factor: Option<f64>,
    pub(super) architecture: A,
    pub(super) terms: LossTerms,
    pub(super) batches: Vec<(MicroBatch, f64)>,
    pub(super) documents: Documents,
    pub(super) hides_padding: bool,
    pub(super) seed: u64,
    pub(super) tied: TiedShare,
    /// Whether the weights are those after the step.
    pub(super) is_after: bool,
    /// The largest absolute value that an element of the gradient may have.
    pub(super) limit: Option<f64>,
    /// Whether the gradient may have any length, because the fault does not determine it.
    pub(super) has_free_factor: bool,
    /// Whether the user has to know that length.
    pub(super) says_length: bool,
}

impl<A> Trial<A> {
    /// What computes its gradient.
    pub(super) fn computation(&self, dtype: DType, param_dtype: DType) -> Computation<'_, A> {
        Computation {
            architecture: &self.architecture,
            terms: self.terms,
            dtype,
            param_dtype,
            batches: &self.batches,
            documents: self.documents,
            hides_padding: self.hides_padding,
            seed: self.seed,
            tied: self.tied,
        }
    }

    fn planted(&self, cause: Cause, text: &str, plant: impl FnOnce(&mut Self)) -> Self
    where
        Self: Clone,
    {
        let mut trial = Self { cause, text: text.to_owned(), ..self.clone() };
        plant(&mut trial);
        trial
    }
}

/// A fault of one kind, in the sizes that it may have.
pub(super) struct Family<'a, A> {
    /// The size without the fault, if it has one.
    pub(super) stated: Option<f64>,
    /// Sizes that are likely.
    pub(super) sizes: Vec<f64>,
    /// Which other sizes there may be.
    pub(super) between: Between,
    /// The step with the fault.
    pub(super) trial: Box<dyn Fn(f64) -> Option<Trial<A>> + 'a>,
}

impl<'a, A: Clone + 'a> Family<'a, A> {
    /// A fault without a size.
    fn one(trial: Trial<A>) -> Self {
        let trial = Box::new(move |_| Some(trial.clone()));
        Self { stated: None, sizes: vec![1.0], between: Between::Nothing, trial }
    }
}

/// The step as it should be.
pub(super) fn sound<A>(architecture: A, terms: LossTerms, batches: &[MicroBatch]) -> Trial<A> {
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
        limit: None,
        has_free_factor: false,
        says_length: false,
    }
}

/// All faults that this step could have, besides those of how micro-batches are added up; the likely ones first. `largest` is
/// the largest element of the gradient that was used.
pub(super) fn all<'a, A: Clone>(
    sound: &'a Trial<A>,
    batches: &[MicroBatch],
    settings: &'a [Setting<A>],
    is_tied: bool,
    largest: f64,
) -> Vec<Family<'a, A>> {
    let mut trials: Vec<Trial<A>> = by_rows(sound, batches).into_iter().collect();
    trials.extend(labels(sound, batches));
    trials.extend(documents(sound, batches));
    let text =
        format!("each element of the gradient was clipped to {}, as by clip_grad_value_", number(largest));
    trials.push(sound.planted(Cause::Clipping, &text, |trial| {
        (trial.limit, trial.has_free_factor) = (Some(largest), true);
    }));
    if is_tied {
        let text = "the tied weight got only the gradient of the head, not that of the embedding";
        trials.push(sound.planted(Cause::TiedGradientMissing, text, |trial| trial.tied = TiedShare::Head));
        let text = "the tied weight got only the gradient of the embedding, not that of the head";
        trials
            .push(sound.planted(Cause::TiedGradientMissing, text, |trial| trial.tied = TiedShare::Embedding));
    }
    let mut families: Vec<Family<'_, A>> = trials.into_iter().map(Family::one).collect();
    families.extend(auxiliary(sound));
    families.extend(settings.iter().filter(|setting| !setting.is_random).map(|setting| Family {
        stated: setting.stated,
        sizes: setting.sizes.clone(),
        between: setting.between,
        trial: Box::new(move |size| {
            let variant = (setting.model)(size)?;
            Some(sound.planted(Cause::ModelDiffers, &variant.text, |trial| {
                (trial.architecture, trial.factor) = (variant.architecture, variant.factor);
            }))
        }),
    }));
    families.extend(terms(sound));
    let text = "the gradient is that of the weights after the step, not of those before it";
    families.push(Family::one(sound.planted(Cause::ModelDiffers, text, |trial| trial.is_after = true)));
    families
}

/// Documents that see each other, and positions that restart elsewhere.
fn documents<A: Clone>(sound: &Trial<A>, batches: &[MicroBatch]) -> Vec<Trial<A>> {
    let planted = |cause: Cause, text: &str, documents: Documents| {
        sound.planted(cause, text, |trial| trial.documents = documents)
    };
    if batches.iter().any(MicroBatch::is_packed) {
        let joined = "documents that share a row attend to each other, though their positions restart";
        let ignored = "documents that share a row attend to each other, and positions do not restart";
        let runs_on = "positions do not restart with each document";
        return vec![
            planted(Cause::DocumentsAttend, joined, Documents::Joined),
            planted(Cause::DocumentsAttend, ignored, Documents::Ignored),
            planted(Cause::Positions, runs_on, Documents::RunOn),
        ];
    }
    if batches.iter().any(|batch| batch.runs_on) {
        let text = "text attends to the padding in front of it, as without an attention mask";
        return vec![planted(Cause::DocumentsAttend, text, Documents::Ignored)];
    }
    let restarting = |parts: usize| {
        let text =
            format!("positions restart within a text, {parts} times per row, as on ranks that share a row");
        planted(Cause::Positions, &text, Documents::Restarting(parts))
    };
    [2, 4, 8].map(restarting).into()
}

/// The balancing loss of routers counts another number of times.
fn auxiliary<A: Clone>(sound: &Trial<A>) -> Option<Family<'_, A>> {
    let coefficient = sound.terms.router_loss;
    (coefficient != 0.0).then(|| Family {
        stated: Some(1.0),
        sizes: vec![0.0, 2.0],
        between: Between::Linear,
        trial: Box::new(move |size| {
            let text = format!("the balancing loss of the routers counts {} times", number(size));
            Some(sound.planted(Cause::AuxiliaryLoss, &text, |trial| {
                trial.terms.router_loss = size * coefficient;
                trial.factor = Some(size);
            }))
        }),
    })
}

/// Other terms of the loss.
fn terms<A: Clone>(sound: &Trial<A>) -> [Family<'_, A>; 2] {
    let says = |size: f64, name: &str, stated: f64| match (size, stated) {
        (0.0, _) => format!("the loss has no {name}, the run file says {}", number(stated)),
        (_, 0.0) => format!("the loss has {name} ({}), the run file has none", number(size)),
        _ => format!("the loss has {name} ({}), the run file says {}", number(size), number(stated)),
    };
    let family =
        |name: &'static str, stated: f64, usual: f64, with: fn(LossTerms, f64) -> LossTerms| Family {
            stated: Some(stated),
            sizes: if stated == 0.0 { vec![usual, 2.0 * usual] } else { vec![0.0, 2.0 * stated] },
            between: Between::Linear,
            trial: Box::new(move |size| {
                // Not what a loss is made of.
                let is_sensible = (0.0..1.0).contains(&size);
                is_sensible.then(|| {
                    sound.planted(Cause::ModelDiffers, &says(size, name, stated), |trial| {
                        trial.terms = with(trial.terms, size);
                    })
                })
            }),
        };
    [
        family("label smoothing", sound.terms.label_smoothing, 0.1, |terms, label_smoothing| LossTerms {
            label_smoothing,
            ..terms
        }),
        family("z-loss", sound.terms.z_loss, 1e-4, |terms, z_loss| LossTerms { z_loss, ..terms }),
    ]
}

/// The mean over all counted tokens of the step.
fn by_tokens(batches: &[MicroBatch]) -> Vec<(MicroBatch, f64)> {
    let all: usize = batches.iter().map(MicroBatch::counted).sum();
    batches.iter().map(|batch| (batch.clone(), 1.0 / all.max(1) as f64)).collect()
}

/// The mean of the means of all rows; `None` if rows do not count different numbers of tokens.
fn by_rows<A: Clone>(sound: &Trial<A>, batches: &[MicroBatch]) -> Option<Trial<A>> {
    let rows = batches.iter().flat_map(MicroBatch::rows).filter(|row| row.counted() > 0);
    let rows: Vec<(usize, MicroBatch)> = rows.map(|row| (row.counted(), row)).collect();
    let counts = || rows.iter().map(|(tokens, _)| *tokens);
    let [least, most] = [counts().min()?, counts().max()?];
    let text = format!(
        "the loss is the mean of the means of rows, which count from {least} to {most} tokens, not the mean of all tokens"
    );
    let all = rows.len() as f64;
    (least < most).then(|| {
        sound.planted(Cause::LossMeanOfMeans, &text, |trial| {
            let weighted = rows.into_iter().map(|(tokens, row)| (row, 1.0 / (all * tokens as f64)));
            trial.batches = weighted.collect();
        })
    })
}

/// Other positions count, or other targets.
fn labels<A: Clone>(sound: &Trial<A>, batches: &[MicroBatch]) -> Vec<Trial<A>> {
    let mut trials = Vec::new();
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
    trials
}
