//! Who lives in which slot, and which resources an operation touches.
//!
//! Walking a schedule in program order, the tenancy knows for every unit its unsharded slot and its gradient
//! slot. From that follows what each operation reads and writes, which is what waits are derived from (by the
//! compiler) and proven against (by the checker).

mod gradients;

use std::collections::{BTreeMap, BTreeSet};

use super::{OpKind, Source};
use crate::checker::Violation;
use crate::layout::Layout;
use crate::model::{BlockId, ModelSpec};

/// Something that operations of different queues may touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// The parameter shard of a unit.
    Shard(usize),
    /// The sub-shard kept of a unit.
    SubShard(usize),
    /// An unsharded slot.
    Slot(usize),
    /// A gradient slot.
    GradientSlot(usize),
    /// A staging slot.
    StagingSlot(usize),
    /// A reduced slot.
    ReducedSlot(usize),
    /// The stay of a unit in its slot, whichever slot that is: one ends before the next begins.
    Stay(usize),
    /// The stay of a unit's gradient in its slot, whichever slot that is.
    GradientStay(usize),
    /// The tree of unsharded gradient sums of a unit.
    UnshardedSums(usize),
    /// The result of a unit's reduce-scatter.
    Incoming(usize),
    /// The sums of a unit's sharded gradients.
    ShardedGradient(usize),
    /// Loss, norm and other scalars of the step.
    Scalars,
    /// The statistics of an update rule's phase.
    Statistics(usize),
}

/// One use of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Access {
    /// What is touched.
    pub resource: Resource,
    /// Whether it is changed (or given up) rather than read.
    pub write: bool,
}

fn read(resource: Resource) -> Access {
    Access { resource, write: false }
}

fn write(resource: Resource) -> Access {
    Access { resource, write: true }
}

/// A gradient in a slot.
#[derive(Clone, Copy, Debug)]
struct Gradient {
    slot: usize,
    /// Whether it is complete, rather than being written.
    closed: bool,
}

/// The occupants of slots at one point of program order.
#[derive(Clone, Debug)]
pub struct Tenancy<'a> {
    spec: &'a ModelSpec,
    layout: &'a Layout,
    slots: BTreeMap<usize, usize>,
    gradients: BTreeMap<usize, Gradient>,
    sub_shards: Vec<bool>,
    /// Staging slots of units that are uploaded and not gathered yet.
    staged: BTreeMap<usize, usize>,
    /// Units whose reduce-scatter is not folded yet.
    incoming: BTreeSet<usize>,
    /// Reduced slots of units whose gradient is not downloaded yet.
    reduced: BTreeMap<usize, usize>,
    /// Units whose total is on the device.
    totals: BTreeSet<usize>,
}

impl<'a> Tenancy<'a> {
    /// All units sharded, all slots free.
    pub fn new(spec: &'a ModelSpec, layout: &'a Layout) -> Self {
        Self {
            spec,
            layout,
            slots: BTreeMap::new(),
            gradients: BTreeMap::new(),
            sub_shards: vec![false; layout.units.len()],
            staged: BTreeMap::new(),
            incoming: BTreeSet::new(),
            reduced: BTreeMap::new(),
            totals: BTreeSet::new(),
        }
    }

    /// The units that are unsharded (or being gathered) now.
    pub fn resident(&self) -> impl Iterator<Item = usize> + '_ {
        self.slots.keys().copied()
    }

    /// The units that are uploaded and not gathered yet.
    pub fn staged(&self) -> impl Iterator<Item = usize> + '_ {
        self.staged.keys().copied()
    }

    /// The units whose reduced gradient holds a slot.
    pub fn reduced(&self) -> impl Iterator<Item = usize> + '_ {
        self.reduced.keys().copied()
    }

    /// The units whose gradient slot is taken now.
    pub fn open_gradients(&self) -> impl Iterator<Item = usize> + '_ {
        self.gradients.keys().copied()
    }

    /// The units whose reduced gradient is not folded yet.
    pub fn unfolded(&self) -> impl Iterator<Item = usize> + '_ {
        self.incoming.iter().copied()
    }

    /// The gradient slot of a unit.
    pub fn gradient_slot(&self, unit: usize) -> Option<usize> {
        self.gradients.get(&unit).map(|gradient| gradient.slot)
    }

    /// Performs the tenancy change of the next operation and returns what the operation touches.
    ///
    /// # Errors
    /// [`Violation`] when the operation is illegal here: a unit gathered twice, computed on while sharded,
    /// resharded while sharded, a slot taken that has a tenant, or a gradient used out of turn.
    pub fn apply(&mut self, kind: &OpKind) -> Result<Vec<Access>, Violation> {
        let units = 0..self.layout.units.len();
        Ok(match *kind {
            OpKind::BeginStep => {
                units.flat_map(|u| [write(Resource::Shard(u)), write(Resource::ShardedGradient(u))]).collect()
            }
            OpKind::BeginMicroBatch { .. } => Vec::new(),
            OpKind::Upload { unit, staging } => self.upload(unit, staging)?,
            OpKind::AllGather { unit, slot, source, .. } => self.gather(unit, slot, source)?,
            OpKind::Forward { block, .. } => self.compute(block, false)?,
            OpKind::Finish { block, backward } => {
                let mut accesses = self.compute(block, backward)?;
                accesses.push(write(Resource::Scalars));
                accesses
            }
            OpKind::Backward { block } => self.compute(block, true)?,
            OpKind::KeepSubShard { unit } => self.keep_sub_shard(unit)?,
            OpKind::Reshard { unit } => self.reshard(unit)?,
            OpKind::OpenGradient { unit, slot } => self.open_gradient(unit, slot)?,
            OpKind::CloseGradient { unit } => self.close_gradient(unit)?,
            OpKind::FoldUnsharded { unit, last } => self.fold_unsharded(unit, last)?,
            OpKind::ReduceScatter { unit, slot } => self.reduce_scatter(unit, slot)?,
            OpKind::Fold { unit, last } => self.fold(unit, last)?,
            OpKind::AllReduceReplicas { unit } => {
                self.total(unit)?;
                vec![write(Resource::ShardedGradient(unit))]
            }
            OpKind::Download { unit, slot } => self.download(unit, slot)?,
            OpKind::SquareNorm { unit } => {
                self.total(unit)?;
                vec![read(Resource::ShardedGradient(unit)), write(Resource::Scalars)]
            }
            OpKind::ReduceScalars => vec![write(Resource::Scalars)],
            OpKind::Statistics { unit, phase } => {
                let mut accesses = vec![
                    read(Resource::ShardedGradient(unit)),
                    read(Resource::Scalars),
                    write(Resource::Shard(unit)),
                    write(Resource::Statistics(phase)),
                ];
                accesses.extend((0..phase).map(|earlier| read(Resource::Statistics(earlier))));
                accesses
            }
            OpKind::ReduceStatistics { phase } => vec![write(Resource::Statistics(phase))],
            OpKind::Update { unit } => {
                self.totals.remove(&unit);
                vec![
                    read(Resource::ShardedGradient(unit)),
                    read(Resource::Scalars),
                    write(Resource::Shard(unit)),
                ]
            }
        })
    }

    /// The update reads every phase's statistics; phases are known to the caller only.
    pub fn with_statistics(mut accesses: Vec<Access>, phases: usize) -> Vec<Access> {
        accesses.extend((0..phases).map(|phase| read(Resource::Statistics(phase))));
        accesses
    }

    fn name(&self, unit: usize) -> &str {
        &self.layout.units[unit].name
    }

    fn slot(&self, unit: usize) -> Result<usize, Violation> {
        self.slots.get(&unit).copied().ok_or_else(|| Violation::NotUnsharded { unit: self.name(unit).into() })
    }

    fn upload(&mut self, unit: usize, staging: usize) -> Result<Vec<Access>, Violation> {
        if let Some((&tenant, _)) =
            self.staged.iter().find(|&(&tenant, &taken)| taken == staging || tenant == unit)
        {
            let (unit, tenant) = (self.name(unit).into(), self.name(tenant).into());
            return Err(Violation::SlotTaken { slot: staging, unit, tenant });
        }
        self.staged.insert(unit, staging);
        let (staging, stay) = (Resource::StagingSlot(staging), Resource::Stay(unit));
        Ok(vec![read(Resource::Shard(unit)), write(stay), write(staging)])
    }

    fn gather(&mut self, unit: usize, slot: usize, source: Source) -> Result<Vec<Access>, Violation> {
        if let Some((&tenant, _)) =
            self.slots.iter().find(|&(&tenant, &taken)| taken == slot || tenant == unit)
        {
            let (unit, tenant) = (self.name(unit).into(), self.name(tenant).into());
            return Err(Violation::SlotTaken { slot, unit, tenant });
        }
        let from = match source {
            Source::Shard => Resource::Shard(unit),
            Source::SubShard if !self.sub_shards[unit] => {
                return Err(Violation::NoSubShard { unit: self.name(unit).into() });
            }
            Source::SubShard => Resource::SubShard(unit),
            Source::Staged(staging) => {
                if self.staged.remove(&unit) != Some(staging) {
                    return Err(Violation::NotStaged { unit: self.name(unit).into(), staging });
                }
                Resource::StagingSlot(staging)
            }
        };
        self.slots.insert(unit, slot);
        Ok(vec![read(from), write(Resource::Slot(slot)), write(Resource::Stay(unit))])
    }

    fn keep_sub_shard(&mut self, unit: usize) -> Result<Vec<Access>, Violation> {
        let slot = self.slot(unit)?;
        self.sub_shards[unit] = true;
        Ok(vec![read(Resource::Slot(slot)), write(Resource::SubShard(unit))])
    }

    fn reshard(&mut self, unit: usize) -> Result<Vec<Access>, Violation> {
        let slot = self.slot(unit)?;
        self.slots.remove(&unit);
        Ok(vec![write(Resource::Slot(slot)), write(Resource::Stay(unit))])
    }

    fn compute(&self, block: BlockId, backward: bool) -> Result<Vec<Access>, Violation> {
        let mut accesses = Vec::new();
        for &id in &self.spec.block(block).params {
            let (unit, ..) = self.layout.find(id).expect("every parameter lies in a unit");
            let slot = self.slots.get(&unit).copied().ok_or_else(|| Violation::ComputesOnSharded {
                block: self.spec.block(block).name.clone(),
                unit: self.name(unit).into(),
            })?;
            accesses.push(read(Resource::Slot(slot)));
            if backward && self.spec.param(id).trainable {
                accesses.push(write(Resource::GradientSlot(self.open_slot(unit)?)));
            }
        }
        accesses.sort();
        accesses.dedup();
        Ok(accesses)
    }
}
