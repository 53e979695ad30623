//! Known faults of how micro-batches are added up.

use super::{MicroBatches, Weighting, listed};
use crate::audit::report::Cause;
use crate::audit::sums::clip;

/// The known faults, without those that leave everything as it should be.
pub(super) fn suspects(of: &MicroBatches<'_>) -> Vec<Weighting> {
    let mut found = means_of_means(of.tokens);
    found.extend(missing(of.len()));
    if let Some(max) = of.grad_clip {
        found.extend(clipped(of, max));
    }
    found.retain(|weighting| {
        let first = weighting.counts[0];
        weighting.counts.iter().any(|count| (count - first).abs() > 1e-9 * first.abs())
    });
    found
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

fn means_of_means(tokens: &[usize]) -> Vec<Weighting> {
    let all: usize = tokens.iter().sum();
    let with = |groups: usize, group_of: &[usize], text: String| {
        let mut sizes = vec![0; groups];
        tokens.iter().zip(group_of).for_each(|(tokens, group)| sizes[*group] += tokens);
        let groups = sizes.iter().filter(|size| **size > 0).count();
        let count = |group: &usize| all as f64 / (sizes[*group].max(1) * groups) as f64;
        let counts = group_of.iter().map(count).collect();
        Weighting { cause: Cause::LossMeanOfMeans, text, factor: None, counts }
    };
    let each: Vec<usize> = (0..tokens.len()).collect();
    let text = format!(
        "the loss is the mean of the {} means of micro-batches, which count from {} to {} tokens, not the mean of all tokens",
        tokens.len(),
        tokens.iter().min().unwrap_or(&0),
        tokens.iter().max().unwrap_or(&0)
    );
    let mut found = vec![with(tokens.len(), &each, text)];
    for (ranks, how, group_of) in dealt(tokens.len()) {
        let text = format!(
            "the loss is the mean of the means of {ranks} ranks (micro-batches dealt {how}), not the mean of all tokens"
        );
        found.push(with(ranks, &group_of, text));
    }
    found
}

fn missing(count: usize) -> Vec<Weighting> {
    let only = |text: String, is_there: &dyn Fn(usize) -> bool| Weighting {
        cause: Cause::GradientMissing,
        text,
        factor: None,
        counts: (0..count).map(|index| f64::from(is_there(index))).collect(),
    };
    let mut found = Vec::new();
    for (ranks, how, group_of) in dealt(count) {
        let is_last = |index: usize| group_of[index + 1..].iter().all(|group| *group != group_of[index]);
        let text = "of the micro-batches of each rank, only the last one arrived in the gradient";
        found.push(only(format!("{text} ({ranks} ranks, dealt {how})"), &is_last));
    }
    for kept in (0..count).rev() {
        let text = format!("only micro-batch {kept} of {count} arrived in the gradient");
        found.push(only(text, &|index| index == kept));
    }
    for missing in 0..count {
        let text = format!("micro-batch {} of {count} did not arrive in the gradient", listed(&[missing]));
        found.push(only(text, &|index| index != missing));
    }
    found
}

/// Gradients that are clipped before all are there: those of each micro-batch or rank, or the sum after each micro-batch.
fn clipped(of: &MicroBatches<'_>, max: f64) -> Vec<Weighting> {
    let len = of.len();
    let coefficient = |counts: &[f64]| clip(Some(max), of.plain.norm(counts));
    let weighting = |text: String, counts: Vec<f64>| Weighting {
        cause: Cause::Clipping,
        text: format!("{text}, not the gradient of the whole step"),
        factor: None,
        counts,
    };
    // Groups that arrive one after the other: micro-batches of one rank, or the next ones of all ranks.
    let rounds = dealt(len).map(|(ranks, how, group_of)| {
        let round =
            |index: usize| group_of[..index].iter().filter(|group| **group == group_of[index]).count();
        (format!(" ({ranks} ranks, dealt {how})"), (0..len).map(round).collect())
    });
    let mut found = Vec::new();
    for (how, group_of) in [(String::new(), (0..len).collect::<Vec<usize>>())].into_iter().chain(rounds) {
        let members = |round: usize| group_of.iter().map(move |group| f64::from(*group == round));
        let groups = group_of.iter().max().map_or(0, |last| last + 1);
        let own: Vec<f64> =
            (0..groups).map(|round| coefficient(&members(round).collect::<Vec<_>>())).collect();
        let text = format!("each micro-batch was clipped to {max} by its own norm{how}");
        found.push(weighting(text, group_of.iter().map(|round| own[*round]).collect()));
        // What had been added up before is clipped again with each.
        let mut counts = vec![0.0; len];
        for round in 0..groups {
            counts.iter_mut().zip(members(round)).for_each(|(count, is_new)| *count += is_new);
            let coefficient = coefficient(&counts);
            counts.iter_mut().for_each(|count| *count *= coefficient);
        }
        found.push(weighting(format!("the sum was clipped to {max} after each micro-batch{how}"), counts));
    }
    for (ranks, how, group_of) in dealt(len).chain([(len, "one each", (0..len).collect())]) {
        let share =
            |rank: usize| group_of.iter().map(move |group| if *group == rank { ranks as f64 } else { 0.0 });
        let own: Vec<f64> = (0..ranks).map(|rank| coefficient(&share(rank).collect::<Vec<_>>())).collect();
        let text = format!(
            "each of {ranks} ranks (micro-batches dealt {how}) clipped its gradient to {max} by its own norm"
        );
        found.push(weighting(text, group_of.iter().map(|&rank| own[rank]).collect()));
    }
    found
}
