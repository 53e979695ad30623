//! Describes a model in one pass: modules, parameters, initialization and blocks.
//!
//! Names are built from the open modules, so describing a model in the order of its Hugging Face classes gives the
//! names of its checkpoint.

use std::collections::BTreeMap;
use std::ops::Range;

use fsdp_core::model::{BlockId, BlockSpec, ModelSpec, ModuleSpec, ParamId, ParamSpec};
use fsdp_core::{Error, Tallies};

use super::{Adapter, Embedding, ExpertMaps, Head, Init, Layer, LayerNorm, Linear, PackedWeight, RmsNorm};
use crate::backend::Orientation;
use crate::op::{LossTerms, ROUTER_SUMS, RouterTerms};

/// A described model.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// Parameters, modules and blocks.
    pub spec: ModelSpec,
    /// Initialization of each parameter, indexed by [`ParamId`].
    pub init: Vec<Init>,
    /// The linear maps that can be adapted, each with the index of its module.
    pub linears: Vec<(usize, Linear)>,
    /// The linear maps of experts.
    pub experts: Vec<ExpertMaps>,
    /// Adapters of linear maps, by the map's weight: also of those of experts, where maps of one input share `A`.
    pub adapters: BTreeMap<ParamId, Adapter>,
    /// Number of parameters that belong to adapters: the last ones.
    pub added: usize,
    /// Weights that are quantized.
    pub quantized: BTreeMap<ParamId, PackedWeight>,
    /// For parameters that do not process every token (those of experts), the fraction of tokens that they process.
    pub token_shares: BTreeMap<ParamId, f64>,
    /// The blocks that are mixtures, with their number of experts.
    pub mixtures: BTreeMap<BlockId, usize>,
    /// The parameters that correct the scores of a mixture's experts for the choice, for mixtures that have one.
    pub score_biases: BTreeMap<BlockId, ParamId>,
    /// Whether some blocks have linear attention.
    pub linear_attention: bool,
    /// Coefficient of the routers' balancing loss in the model's own configuration; 0 if it has none.
    pub router_loss: f64,
}

impl Description {
    /// Returns the initialization of a parameter.
    pub fn init(&self, id: ParamId) -> Init {
        self.init[id.0]
    }

    /// Returns the model's mixtures with the coefficients of what they add to the loss, or `None` if it has none. All
    /// mixtures have the same number of experts.
    pub fn router_terms(&self, terms: LossTerms) -> Option<RouterTerms> {
        let LossTerms { router_loss: balance, router_z_loss: z_loss, loss_scale, .. } = terms;
        let sequence = terms.router_sequence_loss;
        let &experts = self.mixtures.values().next()?;
        Some(RouterTerms { layers: self.mixtures.len(), experts, balance, z_loss, sequence, loss_scale })
    }

    /// Returns the range of a block's load among the loads of all mixtures; empty if the block is not a mixture.
    pub(crate) fn load(&self, block: BlockId, terms: LossTerms) -> Range<usize> {
        let len = self.router_terms(terms).map_or(0, |terms| terms.load_len());
        let start = self.mixtures.range(..block).count() * len;
        start..start + if self.mixtures.contains_key(&block) { len } else { 0 }
    }
}

/// Builds a [`Description`].
#[derive(Debug)]
pub struct Describe {
    description: Description,
    open: usize,
    std: f64,
}

impl Describe {
    /// Starts a model whose root module is of `class`; weights are initialized from a normal distribution with
    /// standard deviation `std`.
    pub fn new(class: &str, std: f64) -> Self {
        let root = ModuleSpec { fqn: String::new(), class: class.into(), parent: None, params: Vec::new() };
        let spec = ModelSpec {
            params: Vec::new(),
            modules: vec![root],
            blocks: Vec::new(),
            tallies: Tallies::default(),
        };
        let description = Description {
            spec,
            init: Vec::new(),
            linears: Vec::new(),
            experts: Vec::new(),
            adapters: BTreeMap::new(),
            added: 0,
            quantized: BTreeMap::new(),
            token_shares: BTreeMap::new(),
            mixtures: BTreeMap::new(),
            score_biases: BTreeMap::new(),
            linear_attention: false,
            router_loss: 0.0,
        };
        Self { description, open: 0, std }
    }

    /// Describes a module; everything that `inside` adds belongs to it.
    pub fn module<T>(&mut self, name: &str, class: &str, inside: impl FnOnce(&mut Self) -> T) -> T {
        let fqn = self.fqn(name);
        let modules = &mut self.description.spec.modules;
        modules.push(ModuleSpec { fqn, class: class.into(), parent: Some(self.open), params: Vec::new() });
        let parent = std::mem::replace(&mut self.open, modules.len() - 1);
        let result = inside(self);
        self.open = parent;
        result
    }

    /// Adds a parameter to the open module.
    pub fn param(&mut self, name: &str, shape: &[usize], init: Init) -> ParamId {
        let fqn = self.fqn(name);
        let spec = &mut self.description.spec;
        let id = ParamId(spec.params.len());
        spec.params.push(ParamSpec {
            fqn,
            aliases: Vec::new(),
            shape: shape.to_vec(),
            trainable: true,
            expert: None,
            quantized: None,
            keep_f32: false,
        });
        spec.modules[self.open].params.push(id);
        self.description.init.push(init);
        id
    }

    /// Adds a parameter with the initialization of weights to the open module.
    pub fn weight(&mut self, name: &str, shape: &[usize]) -> ParamId {
        self.param(name, shape, self.weight_init())
    }

    /// Keeps the parameters in f32 whose names end like one of these.
    pub fn keep_f32(&mut self, names: &[&str]) {
        let params = self.description.spec.params.iter_mut();
        params.for_each(|param| param.keep_f32 = names.iter().any(|name| param.fqn.ends_with(name)));
    }

    /// Adds a parameter that is never trained and initially zero: a buffer of the model, in PyTorch's words.
    pub fn constant(&mut self, name: &str, shape: &[usize]) -> ParamId {
        let id = self.param(name, shape, Init::Zeros);
        self.description.spec.params[id.0].trainable = false;
        id
    }

    /// Adds a module `Linear` (weight `outputs x inputs`).
    pub fn linear(&mut self, name: &str, inputs: usize, outputs: usize, bias: bool) -> Linear {
        let init = self.weight_init();
        self.module(name, "Linear", |d| {
            let weight = d.param("weight", &[outputs, inputs], init);
            let bias = bias.then(|| d.param("bias", &[outputs], Init::Zeros));
            d.adaptable(Linear { weight, bias, inputs, outputs, orientation: Orientation::OutIn })
        })
    }

    /// Adds the router of a mixture of experts: a linear map that cannot be adapted, as in PEFT.
    pub fn router(&mut self, name: &str, inputs: usize, experts: usize, bias: bool) -> Linear {
        let init = self.weight_init();
        self.module(name, "Router", |d| {
            let weight = d.param("weight", &[experts, inputs], init);
            let bias = bias.then(|| d.param("bias", &[experts], Init::Zeros));
            Linear { weight, bias, inputs, outputs: experts, orientation: Orientation::OutIn }
        })
    }

    /// Adds a weight (with two dimensions) or a bias of an expert, to which a fraction `share` of all tokens is routed.
    pub fn expert(&mut self, number: usize, name: &str, shape: &[usize], share: f64) -> ParamId {
        let init = if shape.len() > 1 { self.weight_init() } else { Init::Zeros };
        let param = self.param(name, shape, init);
        self.description.token_shares.insert(param, share);
        self.description.spec.params[param.0].expert = Some(number);
        param
    }

    /// Notes the linear maps of experts, whose parameters have been added.
    pub fn experts(&mut self, maps: ExpertMaps) -> ExpertMaps {
        self.description.experts.push(maps.clone());
        maps
    }

    /// Adds a module `Conv1D`, GPT-2's linear map (weight `inputs x outputs`), initialized with standard deviation
    /// `std`.
    pub fn conv1d(&mut self, name: &str, inputs: usize, outputs: usize, std: f64) -> Linear {
        self.module(name, "Conv1D", |d| {
            let weight = d.param("weight", &[inputs, outputs], Init::Normal { std });
            let bias = Some(d.param("bias", &[outputs], Init::Zeros));
            d.adaptable(Linear { weight, bias, inputs, outputs, orientation: Orientation::InOut })
        })
    }

    /// Records that the open module is a linear map that can be adapted.
    fn adaptable(&mut self, layer: Linear) -> Linear {
        self.description.linears.push((self.open, layer));
        layer
    }

    /// Adds a module `Embedding`.
    pub fn embedding(&mut self, name: &str, rows: usize, width: usize) -> Embedding {
        self.padded_embedding(name, rows, width, None)
    }

    /// As [`Describe::embedding`], with a row for padding, which is initially zero
    /// ([`Embedding::padding`]).
    pub fn padded_embedding(
        &mut self,
        name: &str,
        rows: usize,
        width: usize,
        padding: Option<usize>,
    ) -> Embedding {
        let std = self.std;
        let init = padding.map_or(self.weight_init(), |zero_row| Init::Table { std, width, zero_row });
        self.module(name, "Embedding", |d| Embedding {
            table: d.param("weight", &[rows, width], init),
            rows,
            width,
            padding,
        })
    }

    /// Adds an RMS norm of the given class, for example `LlamaRMSNorm`.
    pub fn rms_norm(&mut self, name: &str, class: &str, width: usize, eps: f64) -> RmsNorm {
        self.module(name, class, |d| RmsNorm {
            weight: d.param("weight", &[width], Init::Ones),
            width,
            eps,
            offset: 0.0,
        })
    }

    /// As [`Describe::rms_norm`], with a weight that is added to one to give the scale.
    pub fn centred_rms_norm(&mut self, name: &str, class: &str, width: usize, eps: f64) -> RmsNorm {
        self.module(name, class, |d| RmsNorm {
            weight: d.param("weight", &[width], Init::Zeros),
            width,
            eps,
            offset: 1.0,
        })
    }

    /// Adds a module `LayerNorm`.
    pub fn layer_norm(&mut self, name: &str, width: usize, eps: f64) -> LayerNorm {
        self.module(name, "LayerNorm", |d| LayerNorm {
            weight: d.param("weight", &[width], Init::Ones),
            bias: Some(d.param("bias", &[width], Init::Zeros)),
            width,
            eps,
        })
    }

    /// Adds a module of class `class` that is a layer norm without a bias (Cohere).
    pub fn layer_norm_without_bias(&mut self, name: &str, class: &str, width: usize, eps: f64) -> LayerNorm {
        self.module(name, class, |d| LayerNorm {
            weight: d.param("weight", &[width], Init::Ones),
            bias: None,
            width,
            eps,
        })
    }

    /// Adds a module `Linear` as the output head, with its own weight or the one of `tied`.
    pub fn head(&mut self, name: &str, hidden: usize, vocab: usize, tied: Option<&Embedding>) -> Head {
        let init = self.weight_init();
        self.module(name, "Linear", |d| match tied {
            None => Head { weight: d.param("weight", &[vocab, hidden], init), vocab, hidden, softcap: None },
            Some(table) => {
                let alias = d.fqn("weight");
                d.description.spec.params[table.table.0].aliases.push(alias);
                table.as_head()
            }
        })
    }

    /// Adds a block that uses `layers`; `layer` is the index of the repeated layer it belongs to.
    pub fn block(&mut self, name: &str, layer: Option<usize>, layers: &[&dyn Layer]) {
        let mut params: Vec<ParamId> = layers.iter().flat_map(|layer| layer.params()).collect();
        params.sort();
        params.dedup();
        self.description.spec.blocks.push(BlockSpec { name: name.into(), params, layer });
    }

    /// Declares that the last block is a mixture of `experts` experts, and the parameter that corrects their scores.
    pub fn mixture(&mut self, experts: usize, score_bias: Option<ParamId>) {
        let block = BlockId(self.description.spec.blocks.len() - 1);
        self.description.mixtures.insert(block, experts);
        self.description.score_biases.extend(score_bias.map(|bias| (block, bias)));
    }

    /// Declares that the model has linear attention.
    pub fn linear_attention(&mut self) {
        self.description.linear_attention = true;
    }

    /// Sets the coefficient of the routers' balancing loss from the model's own configuration.
    pub fn router_loss(&mut self, coefficient: f64) {
        self.description.router_loss = coefficient;
    }

    /// Returns the finished description.
    ///
    /// # Errors
    /// [`Error::Model`] if it is inconsistent (see [`ModelSpec::validate`]).
    pub fn finish(mut self) -> Result<Description, Error> {
        // The losses of the routers, and the load of every expert: `model::Counted` finds them.
        let counts = self.description.mixtures.values().sum();
        self.description.spec.tallies = Tallies { sums: if counts > 0 { ROUTER_SUMS } else { 0 }, counts };
        self.description.spec.validate()?;
        Ok(self.description)
    }

    fn weight_init(&self) -> Init {
        Init::Normal { std: self.std }
    }

    fn fqn(&self, name: &str) -> String {
        let module = &self.description.spec.modules[self.open].fqn;
        if module.is_empty() { name.into() } else { format!("{module}.{name}") }
    }
}
