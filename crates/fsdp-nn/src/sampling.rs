//! Which token follows: the likeliest one, or one that is drawn.

use crate::random;

/// How a token is drawn. The steps are those of transformers, in its order: logits are divided by the temperature, all but
/// the `top_k` largest are left out, then the least likely ones that together have no more than `1 - top_p`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// What logits are divided by, above 0.
    pub temperature: f64,
    /// How many of the largest logits are left, at least 1; equal ones stay together.
    pub top_k: Option<usize>,
    /// The probability that is left at least, above 0 and at most 1.
    pub top_p: Option<f64>,
    /// The key of the random numbers, one for each token.
    pub seed: u64,
}

impl Sampling {
    /// The probability of each token.
    ///
    /// # Panics
    /// Without a logit.
    pub fn probabilities(&self, logits: &[f64]) -> Vec<f64> {
        let mut logits: Vec<f64> = logits.iter().map(|logit| logit / self.temperature).collect();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        if let Some(&last) = self.top_k.and_then(|count| order.get(count.max(1) - 1)) {
            let least = logits[last];
            logits.iter_mut().filter(|logit| **logit < least).for_each(|logit| *logit = f64::NEG_INFINITY);
        }
        let probabilities = softmax(&logits);
        let Some(top_p) = self.top_p else { return probabilities };
        let mut rest = 0.0;
        for &token in order.iter().skip(1).rev() {
            rest += probabilities[token];
            if rest > 1.0 - top_p {
                break;
            }
            logits[token] = f64::NEG_INFINITY;
        }
        softmax(&logits)
    }

    /// Draws the token at a place of the text: the same one for the same logits, seed and place.
    ///
    /// # Panics
    /// As [`Sampling::probabilities`].
    pub fn draw(&self, logits: &[f64], place: u64) -> u32 {
        let probabilities = self.probabilities(logits);
        let drawn = random::uniform(random::key(&[self.seed, random::name_part("token")]), place);
        let mut sum = 0.0;
        let found = probabilities.iter().position(|probability| {
            sum += probability;
            drawn < sum
        });
        // Sums of rounded numbers may end a little below 1.
        let last = || probabilities.iter().rposition(|&probability| probability > 0.0);
        found.or_else(last).unwrap_or_default() as u32
    }
}

/// The token with the largest logit; of equal ones the first.
pub fn likeliest(logits: &[f64]) -> u32 {
    let larger = |best: usize, token: usize| if logits[token] > logits[best] { token } else { best };
    (0..logits.len()).fold(0, larger) as u32
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exponentials: Vec<f64> = logits.iter().map(|logit| (logit - largest).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    exponentials.into_iter().map(|exponential| exponential / sum).collect()
}

#[cfg(test)]
mod tests;
