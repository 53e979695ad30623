//! A plan: everything about a training run that is the same on all ranks.

use std::collections::BTreeSet;

use crate::checker;
use crate::error::Error;
use crate::layout::Layout;
use crate::mesh::{Axis, Group, Mesh};
use crate::model::ModelSpec;
use crate::rank::{Queue, Rank};
use crate::schedule::{
    Compiler, Offload, Policy, Schedule, compile_evaluation, compile_evaluation_alone, compile_step,
};
use crate::update::{RankTables, RuleDecl, RuleState};

/// Everything about a training run that is the same on all ranks.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The model.
    pub spec: ModelSpec,
    /// The layout of its units over the shard axis.
    pub layout: Layout,
    /// The mesh.
    pub mesh: Mesh,
    /// The resolved policy.
    pub policy: Policy,
    /// The schedule of a training step; for a plan of [`Plan::to_evaluate`], the schedule of an evaluation.
    pub step: Schedule,
    /// The schedule of an evaluation, with the same buffers as the step; `None` if the run does not evaluate.
    pub evaluation: Option<Schedule>,
}

impl Plan {
    /// Compiles and checks the schedules: `rounds` micro-batches per step and rank, and `evaluation_rounds` batches per
    /// evaluation and rank (0: no evaluation).
    ///
    /// # Errors
    /// [`Error::Policy`], [`Error::Schedule`].
    pub fn new(
        spec: ModelSpec,
        layout: Layout,
        mesh: Mesh,
        policy: Policy,
        rule: &RuleDecl,
        rounds: usize,
        evaluation_rounds: usize,
    ) -> Result<Self, Error> {
        let Self { spec, layout, policy, step, .. } =
            Self::new_unchecked(spec, layout, mesh, policy, rule, rounds)?;
        checker::check(&step, &spec, &layout)?;
        let compiler = Compiler { spec: &spec, layout: &layout, mesh, policy: &policy, rule };
        let evaluation = match evaluation_rounds {
            0 => None,
            rounds => Some(compile_evaluation(&compiler, &step, rounds)),
        };
        if let Some(evaluation) = &evaluation {
            assert_eq!(evaluation.buffers, step.buffers, "an evaluation needs no more slots than training");
            checker::check(evaluation, &spec, &layout)?;
        }
        Ok(Self { spec, layout, mesh, policy, step, evaluation })
    }

    /// As [`Plan::new`] without evaluation and without the safety check: for predictions, not to be run.
    ///
    /// # Errors
    /// [`Error::Policy`]: also when state is offloaded and the rule needs whole parameters.
    pub fn new_unchecked(
        spec: ModelSpec,
        layout: Layout,
        mesh: Mesh,
        policy: Policy,
        rule: &RuleDecl,
        rounds: usize,
    ) -> Result<Self, Error> {
        let policy = policy.resolve(mesh)?;
        if policy.offload == Offload::Cpu && !rule.whole.is_empty() {
            return Err(Error::Policy {
                key: "offload",
                value: "cpu".into(),
                expected: "an optimizer of whole matrices (muon) updates them where they are gathered; set offload to \
                           \"none\", or choose another optimizer"
                    .into(),
            });
        }
        let compiler = Compiler { spec: &spec, layout: &layout, mesh, policy: &policy, rule };
        let step = compile_step(&compiler, rounds);
        Ok(Self { spec, layout, mesh, policy, step, evaluation: None })
    }

    /// The most gradients of one unit that the calls of a micro-batch compute: one for each chunk of a sample, and for
    /// experts one for each chunk of each rank of the expert axis.
    pub(crate) fn leaves(&self) -> usize {
        let blocks = self.layout.units.iter().map(|unit| unit.blocks).max().unwrap_or(1);
        self.step.chunks * blocks
    }

    /// The contents of a rank's shards.
    pub fn tables(&self, rule: &dyn RuleState, rank: Rank) -> RankTables {
        RankTables::new(&self.layout, self.mesh, self.policy.kept_dtype(true), rule, rank)
    }

    /// The groups that collectives run over, with their queues: those of the schedules, that which receives what the
    /// first replica reads ([`Origin::Read`](crate::engine::Origin::Read)), and that within which blocks redistribute
    /// activations.
    pub fn groups(&self) -> BTreeSet<(Queue, Group)> {
        let mut groups: BTreeSet<_> =
            [&self.step].into_iter().chain(&self.evaluation).flat_map(Schedule::groups).collect();
        if self.mesh.size(Axis::Replicate) > 1 {
            groups.insert((Queue::Reduce, Group::REPLICATE));
        }
        if self.mesh.size(Axis::Context) > 1 {
            groups.insert((Queue::Compute, Group::CONTEXT));
        }
        if self.mesh.expert() > 1 {
            groups.insert((Queue::Compute, Group::EXPERT));
        }
        groups
    }

    /// Compiles and checks the schedule of a model that is evaluated but not trained: `rounds` batches per evaluation
    /// and rank, with buffers for parameters but none for gradients or optimizer state.
    ///
    /// # Errors
    /// As [`Plan::new`].
    ///
    /// # Panics
    /// When a parameter is trainable.
    pub fn to_evaluate(
        spec: ModelSpec,
        layout: Layout,
        mesh: Mesh,
        policy: Policy,
        rounds: usize,
    ) -> Result<Self, Error> {
        let policy = policy.resolve(mesh)?;
        let rule = &RuleDecl::default();
        let compiler = Compiler { spec: &spec, layout: &layout, mesh, policy: &policy, rule };
        let step = compile_evaluation_alone(&compiler, rounds);
        checker::check(&step, &spec, &layout)?;
        Ok(Self { spec, layout, mesh, policy, evaluation: Some(step.clone()), step })
    }
}
