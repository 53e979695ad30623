//! Assigns samples to micro-batches in evaluations.

/// Cuts evaluation data into global batches, in order; the last one is filled up with masked samples.
///
/// Batches are as large as in training, so that every rank issues the same collectives, and so that every world size
/// evaluates the same samples in the same order of addition.
#[derive(Clone, Debug)]
pub(super) struct EvalSampler {
    samples: usize,
    batches: usize,
    global_batch: usize,
    micro_batch: usize,
}

impl EvalSampler {
    /// Creates a sampler over `samples` samples that stops after `batches_max` global batches, or at the end if that is
    /// 0.
    ///
    /// # Panics
    /// If the micro-batch size does not divide the global batch size, which a resolved configuration rules out.
    pub(super) fn new(
        samples: usize,
        global_batch: usize,
        micro_batch: usize,
        batches_max: u64,
    ) -> EvalSampler {
        assert!(global_batch > 0 && global_batch.is_multiple_of(micro_batch), "V is a whole number");
        let all = samples.div_ceil(global_batch);
        let batches =
            if batches_max == 0 { all } else { all.min(usize::try_from(batches_max).unwrap_or(all)) };
        EvalSampler { samples, batches, global_batch, micro_batch }
    }

    /// Number of global batches.
    pub(super) fn batches(&self) -> usize {
        self.batches
    }

    /// Micro-batches per global batch, V.
    pub(super) fn micro_batches(&self) -> usize {
        self.global_batch / self.micro_batch
    }

    /// Returns the samples of a micro-batch of a global batch, both counted from 0; `None` is a masked sample.
    ///
    /// # Panics
    /// If there is no such batch or micro-batch.
    pub(super) fn batch(&self, batch: usize, micro_batch: usize) -> Vec<Option<usize>> {
        assert!(batch < self.batches && micro_batch < self.micro_batches(), "the batch exists");
        let start = batch * self.global_batch + micro_batch * self.micro_batch;
        (start..start + self.micro_batch).map(|sample| (sample < self.samples).then_some(sample)).collect()
    }
}

#[cfg(test)]
mod tests;
