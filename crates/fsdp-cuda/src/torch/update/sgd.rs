//! Stochastic gradient descent.

use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_core::{Error, Queue};
use fsdp_nn::update::{GroupSettings, Sgd};

use super::blocks::{Block, each_block};
use crate::torch::error::Failure;
use crate::torch::memory::Torch;
use crate::torch::storage::TorchStorage;

impl<D: TorchStorage> UpdateRule<Torch<D>> for Sgd
where
    Sgd: UpdateRule<D>,
{
    fn update(
        &mut self,
        memory: &Torch<D>,
        shard: &mut SegmentShard<'_, D::Buffer>,
        scalars: &StepScalars<'_, D::Buffer>,
        statistics: &[D::Buffer],
    ) -> Result<(), Error> {
        if !memory.must_compose(&[shard.params]) {
            return UpdateRule::<D>::update(self, memory.storage(), shard, scalars, statistics);
        }
        memory.in_torch(Queue::Compute, "sgd", || {
            each_block(memory, shard, scalars.factors, &self.groups, |param, block| {
                let group = self.groups.of(param);
                let is_first = group.own_step(scalars.step) == 1;
                step(self, group, scalars.lr * group.lr_scale, is_first, block)
            })
        })?;
        shard.refresh(memory)
    }
}

fn step(rule: &Sgd, group: GroupSettings, lr: f64, first: bool, mut block: Block<'_>) -> Result<(), Failure> {
    let gradient = block.gradient.f_add(&block.params.f_mul_scalar(group.weight_decay)?)?;
    let (direction, state) = if rule.momentum == 0.0 {
        (gradient, Vec::new())
    } else {
        let [momentum] = &block.state[..] else { block.wrong_state(1) };
        let average = if first {
            gradient.shallow_clone()
        } else {
            let undamped = gradient.f_mul_scalar(1.0 - rule.dampening)?;
            momentum.f_mul_scalar(rule.momentum)?.f_add(&undamped)?
        };
        let direction = if rule.nesterov {
            gradient.f_add(&average.f_mul_scalar(rule.momentum)?)?
        } else {
            average.shallow_clone()
        };
        (direction, vec![average])
    };
    let params = block.params.f_add(&direction.f_mul_scalar(-lr)?)?;
    block.put(&params, &state)
}
