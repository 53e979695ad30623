//! Low-rank adapters for the linear maps of a described model, also for those of experts: LoRA, and DoRA.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use fsdp_core::model::{ModuleSpec, ParamId, ParamSpec};

use super::{Description, ExpertMaps, Init, Linear, PackedWeight};
use crate::backend::Orientation;
use crate::op::ExpertDims;
use crate::quantized::{Format, Packed};

/// The adapter of a linear map (LoRA: Hu et al., 2021): `y += scale * dropout(x) A^T B^T`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adapter {
    /// `A`, which maps the input to `rank` columns: `rank x inputs`.
    pub down: Linear,
    /// `B`, which maps these to the output: `outputs x rank`.
    pub up: Linear,
    /// Factor of the product.
    pub scale: f64,
    /// Dropout rate of the input.
    pub dropout: f64,
    /// The length of every row of the adapted weight, `outputs` numbers (DoRA: Liu et al., 2024). `None` if rows have the
    /// lengths that the sum gives them.
    pub magnitude: Option<ParamId>,
}

impl Adapter {
    /// Its parameters.
    pub fn params(&self) -> impl Iterator<Item = ParamId> + use<> {
        [self.down.weight, self.up.weight].into_iter().chain(self.magnitude)
    }
}

/// The settings of LoRA.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lora {
    /// Number of rows of `A` and columns of `B`.
    pub rank: usize,
    /// Factor of the product: `alpha / rank`, or `alpha / sqrt(rank)` if rank-stabilized (rsLoRA: Kalajdzievski,
    /// 2023).
    pub scale: f64,
    /// Dropout rate of the input of `A`.
    pub dropout: f64,
    /// Whether adapted weights have trained magnitudes (DoRA).
    pub dora: bool,
}

impl Description {
    /// Adds an adapter to each of the linear maps `targets`, numbered as in [`Description::linears`], and freezes all
    /// other parameters except `trained`. Adapters are kept in f32 if the weight is.
    ///
    /// The parameters of an adapter are named `<module>.lora_A.weight`, `<module>.lora_B.weight` and
    /// `<module>.lora_magnitude_vector`. As in PEFT, `A` is initialized uniformly (`kaiming_uniform_` with `a = sqrt(5)`:
    /// within `1 / sqrt(inputs)`) and `B` with zeros, so that the adapted model initially equals its base. That takes
    /// magnitudes which are the lengths of the base's rows; [`Description::init`], which knows no base, says ones.
    ///
    /// # Panics
    /// If a linear map does not exist or already has an adapter.
    pub fn adapt(&mut self, targets: &[usize], trained: &BTreeSet<ParamId>, lora: Lora) {
        for (id, param) in self.spec.params.iter_mut().enumerate() {
            param.trainable = trained.contains(&ParamId(id));
        }
        for &target in targets {
            let (module, base) = self.linears[target];
            let bound = 1.0 / (base.inputs as f64).sqrt();
            let name = self.spec.modules[module].fqn.clone();
            let down =
                self.low_rank((module, &name), "lora_A", [base.inputs, lora.rank], Init::Uniform { bound });
            let up = self.low_rank((module, &name), "lora_B", [lora.rank, base.outputs], Init::Zeros);
            let magnitude = lora.dora.then(|| self.magnitude(module, base.outputs));
            let adapter = Adapter { down, up, scale: lora.scale, dropout: lora.dropout, magnitude };
            let keep_f32 = self.spec.param(base.weight).keep_f32;
            adapter.params().for_each(|id| self.spec.params[id.0].keep_f32 = keep_f32);
            for block in self.spec.blocks.iter_mut().filter(|block| block.params.contains(&base.weight)) {
                block.params.extend(adapter.params());
            }
            let before = self.adapters.insert(base.weight, adapter);
            assert!(before.is_none(), "a linear map has one adapter");
        }
    }

    /// As [`Description::adapt`], which freezes other parameters and comes first, for maps of experts that have the same input,
    /// numbered as in [`Description::experts`]: each expert has one `A`, and a `B` for each of its maps. They are named after the
    /// weights, without an ending `.weight`; `A` after that of the first map.
    ///
    /// # Panics
    /// As [`Description::adapt`]; or if adapters have dropout or magnitudes.
    pub fn adapt_experts(&mut self, maps: Range<usize>, lora: Lora) {
        assert!(lora.dropout == 0.0 && !lora.dora, "adapters of experts are plain");
        let maps = self.experts[maps].to_vec();
        let modules = self.spec.modules.iter().enumerate();
        let module_of: BTreeMap<ParamId, usize> =
            modules.flat_map(|(index, module)| module.params.iter().map(move |&id| (id, index))).collect();
        let first = self.spec.params.len();
        for expert in 0..maps[0].weights.len() {
            let mut shared = None;
            for ExpertMaps { weights, dims: ExpertDims { inputs, outputs, .. }, .. } in &maps {
                let weight = weights[expert];
                let fqn = self.spec.params[weight.0].fqn.clone();
                let map = (module_of[&weight], fqn.strip_suffix(".weight").unwrap_or(&fqn));
                let init = Init::Uniform { bound: 1.0 / (*inputs as f64).sqrt() };
                let begin = self.spec.params.len();
                let down =
                    *shared.get_or_insert_with(|| self.low_rank(map, "lora_A", [*inputs, lora.rank], init));
                let up = self.low_rank(map, "lora_B", [lora.rank, *outputs], Init::Zeros);
                for id in begin..self.spec.params.len() {
                    self.spec.params[id].expert = self.spec.params[weight.0].expert;
                    self.token_shares.insert(ParamId(id), self.token_shares[&weight]);
                }
                let adapter = Adapter { down, up, scale: lora.scale, dropout: 0.0, magnitude: None };
                let before = self.adapters.insert(weight, adapter);
                assert!(before.is_none(), "a linear map has one adapter");
            }
        }
        let added = (first..self.spec.params.len()).map(ParamId);
        for block in self.spec.blocks.iter_mut().filter(|block| block.params.contains(&maps[0].weights[0])) {
            block.params.extend(added.clone());
        }
    }

    /// Quantizes the frozen weights of experts and, unless the format is for experts alone, of all linear maps that can be
    /// adapted.
    ///
    /// # Errors
    /// The name of a weight that cannot be quantized, and why.
    pub fn quantize(&mut self, format: Format) -> Result<(), (String, String)> {
        let of_linears = self.linears.iter().filter(|_| format != Format::Mxfp4);
        let of_linears = of_linears.map(|(_, map)| (map.weight, map.inputs, map.outputs, map.orientation));
        let of_experts = self.experts.iter().flat_map(|maps| {
            let ExpertDims { inputs, outputs, orientation, .. } = maps.dims;
            maps.weights.iter().map(move |&weight| (weight, inputs, outputs, orientation))
        });
        for (weight, columns, rows, orientation) in of_linears.chain(of_experts) {
            let param = &mut self.spec.params[weight.0];
            if param.trainable {
                continue;
            }
            if !columns.is_multiple_of(format.block()) {
                let why = format!("has {columns} inputs, which blocks of {} do not divide", format.block());
                return Err((param.fqn.clone(), why));
            }
            let matrix = Packed { rows, columns, format };
            param.quantized = Some(matrix.stored());
            self.quantized.insert(weight, PackedWeight { matrix, orientation });
        }
        Ok(())
    }

    /// Adds a module below the module of a linear map, named after the map.
    fn low_rank(
        &mut self,
        (parent, map): (usize, &str),
        name: &str,
        [inputs, outputs]: [usize; 2],
        init: Init,
    ) -> Linear {
        let fqn = format!("{map}.{name}");
        let weight = self.trained(format!("{fqn}.weight"), vec![outputs, inputs], init);
        let (class, parent, params) = ("Linear".to_owned(), Some(parent), vec![weight]);
        self.spec.modules.push(ModuleSpec { fqn, class, parent, params });
        Linear { weight, bias: None, inputs, outputs, orientation: Orientation::OutIn }
    }

    /// Adds a magnitude to the module of a linear map, under the name that PEFT saves it by.
    fn magnitude(&mut self, module: usize, outputs: usize) -> ParamId {
        let fqn = format!("{}.lora_magnitude_vector", self.spec.modules[module].fqn);
        let magnitude = self.trained(fqn, vec![outputs], Init::Ones);
        self.spec.modules[module].params.push(magnitude);
        magnitude
    }

    fn trained(&mut self, fqn: String, shape: Vec<usize>, init: Init) -> ParamId {
        let id = ParamId(self.spec.params.len());
        let aliases = Vec::new();
        self.spec.params.push(ParamSpec {
            fqn,
            aliases,
            shape,
            trainable: true,
            expert: None,
            quantized: None,
            keep_f32: false,
        });
        self.init.push(init);
        self.added += 1;
        id
    }
}
