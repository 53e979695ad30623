//! Choice of the next token from logits: the likeliest one, or a random one.

use crate::random;

/// Settings for drawing a token. The steps and their order are those of transformers: logits are divided by the
/// temperature, all but the `top_k` largest are removed, then the least likely tokens whose probabilities together
/// are at most `1 - top_p`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits, above 0.
    pub temperature: f64,
    /// Number of largest logits to keep, at least 1; logits equal to the smallest kept one are kept too.
    pub top_k: Option<usize>,
    /// Minimum total probability to keep, above 0 and at most 1.
    pub top_p: Option<f64>,
    /// Seed of the random numbers; each token uses one.
    pub seed: u64,
}

impl Sampling {
    /// Returns the probability of each token.
    ///
    /// # Panics
    /// If `logits` is empty.
    pub fn probabilities(&self, logits: &[f64]) -> Vec<f64> {
        let mut logits: Vec<f64> = logits.iter().map(|logit| logit / self.temperature).collect();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        if let Some(&last) = self.top_k.and_then(|count| order.get(count.max(1) - 1)) {
            let threshold = logits[last];
            logits
                .iter_mut()
                .filter(|logit| **logit < threshold)
                .for_each(|logit| *logit = f64::NEG_INFINITY);
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

    /// Draws the token at position `place` of the text. Deterministic in logits, seed and place.
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
        // Rounding may leave the sum of the probabilities slightly below 1.
        let last = || probabilities.iter().rposition(|&probability| probability > 0.0);
        found.or_else(last).unwrap_or_default() as u32
    }
}

/// Returns the token with the largest logit, or the first of equal ones.
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
