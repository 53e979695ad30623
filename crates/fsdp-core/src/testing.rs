//! Random small models and settings for the tests of this crate.
//!
//! A [`Setup`] is a short description that proptest can print and shrink; [`Setup::build`] creates the model, its
//! layout and the rest. The model has the shape of a transformer with everything that complicates schedules: layers of
//! one or two blocks, a block that reads two units, tied and shared parameters, frozen parts, a block without
//! parameters.

use proptest::prelude::*;

use crate::checker;
use crate::comm::ReduceOp;
use crate::dtype::DType;
use crate::layout::Layout;
use crate::mesh::{Axis, Mesh};
use crate::model::{BlockSpec, ModelSpec, ModuleSpec, ParamId, ParamSpec, Quantized};
use crate::plan::Plan;
use crate::scalars::Tallies;
use crate::schedule::{
    Accumulation, AccumulationOrder, Checkpointing, Compiler, Offload, Policy, Reshard, Schedule,
    compile_evaluation, compile_step,
};
use crate::update::RuleDecl;
use crate::wrap::{UnitId, WrapPolicy, units, with_blocks};

/// Which parameters are frozen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frozen {
    Nothing,
    All,
    /// Parameters that only blocks below this one read.
    Below(usize),
    /// Every n-th parameter.
    Every(usize),
}

/// A random model.
#[derive(Clone, Debug)]
pub(crate) struct Sketch {
    pub(crate) layers: usize,
    /// Whether layers have two blocks instead of one.
    pub(crate) halves: bool,
    /// Whether the head uses the embedding.
    pub(crate) tied: bool,
    /// Whether every layer also reads the attention of the layer before it, or the embedding.
    pub(crate) cross: bool,
    /// Whether every layer reads one parameter of the root.
    pub(crate) shared: bool,
    /// Whether a block without parameters precedes the last one.
    pub(crate) empty_block: bool,
    /// Number of experts of every layer.
    pub(crate) experts: usize,
    pub(crate) frozen: Frozen,
    pub(crate) width: usize,
    pub(crate) vocabulary: usize,
}

impl Sketch {
    pub(crate) fn plain(layers: usize) -> Self {
        Self {
            layers,
            halves: false,
            tied: false,
            cross: false,
            shared: false,
            empty_block: false,
            experts: 0,
            frozen: Frozen::Nothing,
            width: 2,
            vocabulary: 3,
        }
    }

    pub(crate) fn spec(&self) -> ModelSpec {
        let mut draft = Draft::default();
        draft.module("", "Model", None);
        let embed = draft.module("embed", "Embedding", Some(0));
        let table = draft.param(embed, "embed.weight", &[self.vocabulary, self.width]);
        let scale = draft.param(0, "scale", &[]);
        draft.block("embed", &[table, scale], None);
        let list = draft.module("layers", "ModuleList", Some(0));
        let mut before = table;
        for layer in 0..self.layers {
            before = self.layer(&mut draft, list, layer, before, scale);
        }
        if self.empty_block {
            draft.block("nothing", &[], None);
        }
        let norm_module = draft.module("norm", "Norm", Some(0));
        let norm = draft.param(norm_module, "norm.weight", &[self.width]);
        let head_module = draft.module("head", "Head", Some(0));
        let head = if self.tied {
            draft.spec.params[table.0].aliases.push("head.weight".into());
            table
        } else {
            draft.param(head_module, "head.weight", &[self.vocabulary, self.width])
        };
        draft.block("head", &[norm, head], None);
        self.freeze(&mut draft.spec);
        draft.spec
    }

    fn layer(
        &self,
        draft: &mut Draft,
        list: usize,
        index: usize,
        before: ParamId,
        scale: ParamId,
    ) -> ParamId {
        let fqn = format!("layers.{index}");
        let module = draft.module(&fqn, "Layer", Some(list));
        let norm = draft.param(module, &format!("{fqn}.norm"), &[self.width]);
        let attention = draft.module(&format!("{fqn}.attention"), "Attention", Some(module));
        let qkv = draft.param(attention, &format!("{fqn}.attention.qkv"), &[self.width, 3, self.width]);
        let mlp = draft.module(&format!("{fqn}.mlp"), "Mlp", Some(module));
        let up = draft.param(mlp, &format!("{fqn}.mlp.up"), &[self.width + 1, self.width]);
        let bias = draft.param(mlp, &format!("{fqn}.mlp.bias"), &[self.width + 1]);
        let mut first = vec![norm, qkv];
        let mut second = vec![norm, up, bias];
        second.extend(self.cross.then_some(before));
        for expert in 0..self.experts {
            let fqn = format!("{fqn}.mlp.experts.{expert}");
            for (name, shape) in
                [("down", vec![self.width, 3]), ("bias", vec![3]), ("up", vec![2, self.width])]
            {
                let id = draft.param(mlp, &format!("{fqn}.{name}"), &shape);
                draft.spec.params[id.0].expert = Some(expert);
                second.push(id);
            }
        }
        first.extend(self.shared.then_some(scale));
        if self.halves {
            draft.block(&format!("{fqn}.attention"), &first, Some(index));
            draft.block(&format!("{fqn}.mlp"), &second, Some(index));
        } else {
            first.extend(&second);
            draft.block(&fqn, &first, Some(index));
        }
        qkv
    }

    fn freeze(&self, spec: &mut ModelSpec) {
        for id in 0..spec.params.len() {
            let last_use = spec.blocks.iter().rposition(|block| block.params.contains(&ParamId(id)));
            spec.params[id].trainable = match self.frozen {
                Frozen::Nothing => true,
                Frozen::All => false,
                Frozen::Below(block) => last_use.is_some_and(|last| last >= block),
                Frozen::Every(n) => id % n != 0,
            };
            // Some parameters keep their precision.
            spec.params[id].keep_f32 = spec.params[id].expert.is_none() && id % 4 == 2;
            // Some frozen matrices are quantized, in rows of any number of bytes.
            let param = &mut spec.params[id];
            if !param.trainable && param.expert.is_none() && param.shape.len() == 2 && id % 3 == 1 {
                param.quantized = Some(Quantized { rows: param.shape[0], row_bytes: 1 + id % 5 });
            }
        }
    }
}

/// A model under construction.
struct Draft {
    spec: ModelSpec,
}

impl Default for Draft {
    fn default() -> Self {
        Self {
            spec: ModelSpec {
                params: Vec::new(),
                modules: Vec::new(),
                blocks: Vec::new(),
                tallies: Tallies::default(),
            },
        }
    }
}

impl Draft {
    fn module(&mut self, fqn: &str, class: &str, parent: Option<usize>) -> usize {
        let (fqn, class) = (fqn.into(), class.into());
        self.spec.modules.push(ModuleSpec { fqn, class, parent, params: Vec::new() });
        self.spec.modules.len() - 1
    }

    fn param(&mut self, module: usize, fqn: &str, shape: &[usize]) -> ParamId {
        let id = ParamId(self.spec.params.len());
        self.spec.params.push(ParamSpec {
            fqn: fqn.into(),
            aliases: Vec::new(),
            shape: shape.to_vec(),
            trainable: true,
            expert: None,
            quantized: None,
            keep_f32: false,
        });
        self.spec.modules[module].params.push(id);
        id
    }

    fn block(&mut self, name: &str, params: &[ParamId], layer: Option<usize>) {
        self.spec.blocks.push(BlockSpec { name: name.into(), params: params.to_vec(), layer });
    }
}

/// A random run.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) sketch: Sketch,
    pub(crate) wrap: WrapPolicy,
    pub(crate) mesh: Mesh,
    pub(crate) policy: Policy,
    pub(crate) phases: usize,
    /// Whether the update needs matrices of layers whole (never with offload).
    pub(crate) whole: bool,
    pub(crate) rounds: usize,
}

impl Setup {
    /// A setup with two ranks and one round in which every layer is a unit.
    pub(crate) fn plain(sketch: Sketch) -> Self {
        Self {
            sketch,
            wrap: WrapPolicy::Classes(vec!["Layer".into()]),
            mesh: Mesh::new([(Axis::Shard, 2)]).unwrap(),
            policy: Policy::default(),
            phases: 0,
            whole: false,
            rounds: 1,
        }
    }

    pub(crate) fn build(&self) -> Built {
        let spec = self.sketch.spec();
        // A wrap policy that splits a tied parameter is an error; the whole model becomes one unit instead.
        let units = units(&spec, &self.wrap)
            .or_else(|_| units(&spec, &WrapPolicy::Classes(vec!["Model".into()])))
            .unwrap();
        // Without experts that are alike, there is no expert axis.
        let divided = with_blocks(&spec, units.clone(), self.mesh.expert());
        let (units, mesh) = match divided {
            Ok(divided) => (divided, self.mesh),
            Err(_) => (units, self.mesh.with_expert(1).unwrap()),
        };
        let policy = self.policy.resolve(mesh).unwrap();
        let layout = Layout::new(&spec, &units, mesh.shards(), policy.param_dtype);
        let rounds = self.rounds;
        let master = policy.param_dtype.master();
        let is_whole = |id: &ParamId| {
            let param = spec.param(*id);
            self.whole
                && policy.offload == Offload::None
                && param.trainable
                && param.fqn.starts_with("layers")
                && param.shape.len() == 2
        };
        let whole = (0..spec.params.len()).map(ParamId).filter(is_whole).collect();
        let rule = RuleDecl { state: vec![master; 2], phases: vec![7; self.phases], whole, scratch: 5 };
        Built { spec, layout, policy, mesh, rule, rounds }
    }
}

/// The inputs of schedule compilation.
pub(crate) struct Built {
    pub(crate) spec: ModelSpec,
    pub(crate) layout: Layout,
    pub(crate) policy: Policy,
    pub(crate) mesh: Mesh,
    pub(crate) rule: RuleDecl,
    pub(crate) rounds: usize,
}

impl Built {
    fn compiler(&self) -> Compiler<'_> {
        let Self { spec, layout, policy, mesh, rule, .. } = self;
        Compiler { spec, layout, mesh: *mesh, policy, rule }
    }

    pub(crate) fn step(&self) -> Schedule {
        compile_step(&self.compiler(), self.rounds)
    }

    pub(crate) fn evaluation(&self) -> Schedule {
        compile_evaluation(&self.compiler(), &self.step(), self.rounds)
    }

    pub(crate) fn plan(&self) -> Plan {
        let Self { spec, layout, mesh, policy, rule, rounds } = self;
        Plan::new(spec.clone(), layout.clone(), *mesh, *policy, rule, *rounds, *rounds).unwrap()
    }

    pub(crate) fn check(&self, schedule: &Schedule) -> Result<(), checker::Violation> {
        checker::check(schedule, &self.spec, &self.layout)
    }

    /// The unit of a parameter, by linear search.
    pub(crate) fn unit_of(&self, id: ParamId) -> UnitId {
        let holds = |unit: &crate::layout::UnitLayout| {
            unit.segments.iter().flat_map(|segment| &segment.params).any(|place| place.param == id)
        };
        UnitId(self.layout.units.iter().position(holds).unwrap())
    }

    /// The units that a block reads.
    pub(crate) fn units_of(&self, block: usize) -> Vec<UnitId> {
        self.spec.blocks[block].params.iter().map(|&id| self.unit_of(id)).collect()
    }
}

fn sketches() -> impl Strategy<Value = Sketch> {
    let frozen = prop_oneof![
        4 => Just(Frozen::Nothing),
        1 => Just(Frozen::All),
        2 => (1usize..9).prop_map(Frozen::Below),
        2 => (2usize..5).prop_map(Frozen::Every),
    ];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let experts = prop_oneof![2 => Just(0usize), 1 => Just(2), 1 => Just(4)];
    (0usize..5, flags, experts, frozen, 1usize..5, 1usize..6).prop_map(
        |(layers, (halves, tied, cross, shared, empty_block), experts, frozen, width, vocabulary)| Sketch {
            layers,
            halves,
            tied,
            cross,
            shared,
            empty_block,
            experts,
            frozen,
            width,
            vocabulary,
        },
    )
}

fn wraps() -> impl Strategy<Value = WrapPolicy> {
    let classes = ["Embedding", "Layer", "Attention", "Mlp", "Norm", "Head"];
    prop_oneof![
        3 => prop::sample::subsequence(classes.to_vec(), 0..=classes.len())
            .prop_map(|picked| WrapPolicy::Classes(picked.into_iter().map(String::from).collect())),
        1 => (0usize..60).prop_map(WrapPolicy::MinParams),
    ]
}

fn policies() -> impl Strategy<Value = (Mesh, Policy)> {
    let mesh =
        prop_oneof![Just((1, 1)), Just((1, 2)), Just((2, 1)), Just((1, 4)), Just((2, 2)), Just((1, 6))];
    let dtypes = prop_oneof![
        Just((DType::F32, DType::F32)),
        Just((DType::Bf16, DType::F32)),
        Just((DType::F16, DType::F32)),
        Just((DType::Bf16, DType::Bf16)),
        Just((DType::F64, DType::F64)),
        Just((DType::F32, DType::F64)),
        Just((DType::Bf16, DType::F64)),
    ];
    let gathers = (0usize..5, 0usize..5, 0usize..5);
    let checkpointing =
        prop_oneof![Just(Checkpointing::None), Just(Checkpointing::Full), Just(Checkpointing::Selective)];
    let flags = any::<[bool; 4]>();
    let context =
        prop_oneof![3 => Just((1usize, 1usize)), 1 => Just((2, 1)), 1 => Just((1, 4)), 1 => Just((2, 2))];
    let expert = prop_oneof![Just(1usize), Just(2), Just(4)];
    (mesh, (context, expert), gathers, flags, dtypes, checkpointing).prop_map(
        |(
            (replicas, shards),
            ((context, chunks), expert),
            (reshard, forward, backward),
            flags,
            dtypes,
            checkpointing,
        )| {
            let [unsharded, running, offloads, frozen_master] = flags;
            let policy = Policy {
                reshard_after_forward: match reshard {
                    0 => Reshard::Auto,
                    1 => Reshard::Always,
                    2 => Reshard::Never,
                    _ => Reshard::ToGroup(if shards * context % 2 == 0 { 2 } else { 1 }),
                },
                forward_prefetch: forward,
                backward_prefetch: backward,
                accumulation: if unsharded { Accumulation::Unsharded } else { Accumulation::Reduce },
                accumulation_order: if running {
                    AccumulationOrder::Running
                } else {
                    AccumulationOrder::Tree
                },
                param_dtype: dtypes.0,
                frozen_master,
                reduce_dtype: dtypes.1,
                reduce_op: ReduceOp::Sum,
                checkpointing,
                offload: if offloads { Offload::Cpu } else { Offload::None },
                chunks: context * chunks,
                expert_chunks: 4,
            };
            let axes = [(Axis::Replicate, replicas), (Axis::Shard, shards), (Axis::Context, context)];
            let mesh = Mesh::new(axes).unwrap();
            (mesh.with_expert(expert).unwrap_or(mesh), policy)
        },
    )
}

/// Random runs.
pub(crate) fn setups() -> impl Strategy<Value = Setup> {
    (sketches(), wraps(), policies(), (0usize..3, any::<bool>()), 1usize..6).prop_map(
        |(sketch, wrap, (mesh, policy), (phases, whole), rounds)| Setup {
            sketch,
            wrap,
            mesh,
            policy,
            phases,
            whole,
            rounds,
        },
    )
}

/// Every combination of policies that changes the shape of a schedule, over one model.
pub(crate) fn grid(sketch: &Sketch) -> Vec<Setup> {
    let mut all = Vec::new();
    for reshard in [Reshard::Auto, Reshard::Always, Reshard::Never, Reshard::ToGroup(2)] {
        for prefetch in 0..3 {
            for mode in 0..16 {
                for rounds in 1..4 {
                    let pick = |bit: usize| mode >> bit & 1 == 1;
                    let policy = Policy {
                        reshard_after_forward: reshard,
                        forward_prefetch: prefetch,
                        backward_prefetch: prefetch,
                        accumulation: [Accumulation::Reduce, Accumulation::Unsharded][usize::from(pick(0))],
                        accumulation_order: [AccumulationOrder::Tree, AccumulationOrder::Running]
                            [usize::from(pick(1))],
                        checkpointing: [Checkpointing::None, Checkpointing::Full][usize::from(pick(2))],
                        offload: [Offload::None, Offload::Cpu][usize::from(pick(3))],
                        chunks: if rounds == 3 { 2 } else { 1 },
                        ..Policy::default()
                    };
                    let mesh = Mesh::new([(Axis::Replicate, 1 + prefetch % 2), (Axis::Shard, 4)]).unwrap();
                    let setup = Setup::plain(sketch.clone());
                    all.push(Setup { policy, mesh, rounds, phases: rounds % 2, whole: rounds == 2, ..setup });
                }
            }
        }
    }
    all
}
