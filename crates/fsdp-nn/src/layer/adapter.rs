//! LoRA: what low-rank adapters add to the linear maps of a described model.

use std::collections::BTreeSet;

use fsdp_core::model::{ModuleSpec, ParamId, ParamSpec};

use super::{Description, Init, Linear};
use crate::backend::Orientation;

/// The adapter of a linear map (LoRA: Hu et al., 2021): `y += scale * dropout(x) A^T B^T`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adapter {
    /// `A`, which takes the input to `rank` columns: `rank x inputs`.
    pub down: Linear,
    /// `B`, which takes those to the output: `outputs x rank`.
    pub up: Linear,
    /// What the product is multiplied by.
    pub scale: f64,
    /// Probability of dropping an element of the input.
    pub dropout: f64,
}

/// How linear maps are adapted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lora {
    /// Rows of `A`, columns of `B`.
    pub rank: usize,
    /// What the product is multiplied by: `alpha / rank`, or `alpha / sqrt(rank)` if it is rank-stabilised (rsLoRA:
    /// Kalajdzievski, 2023).
    pub scale: f64,
    /// Probability of dropping an element of the input of `A`.
    pub dropout: f64,
}

impl Description {
    /// Gives linear maps, numbered as in [`Description::linears`], an adapter each, and freezes every other parameter but
    /// those of `trained`.
    ///
    /// The parameters of an adapter are called `<module>.lora_A.weight` and `<module>.lora_B.weight`. As in PEFT, `A` starts
    /// uniform (`kaiming_uniform_` with `a = sqrt(5)`: within `1 / sqrt(inputs)`) and `B` zero, so that a model starts as its
    /// base.
    ///
    /// # Panics
    /// When there is no such linear map, or it has an adapter.
    pub fn adapt(&mut self, targets: &[usize], trained: &BTreeSet<ParamId>, lora: Lora) {
        for (id, param) in self.spec.params.iter_mut().enumerate() {
            param.trainable = trained.contains(&ParamId(id));
        }
        for &target in targets {
            let (module, base) = self.linears[target];
            let bound = 1.0 / (base.inputs as f64).sqrt();
            let down = self.low_rank(module, "lora_A", [base.inputs, lora.rank], Init::Uniform { bound });
            let up = self.low_rank(module, "lora_B", [lora.rank, base.outputs], Init::Zeros);
            for block in self.spec.blocks.iter_mut().filter(|block| block.params.contains(&base.weight)) {
                block.params.extend([down.weight, up.weight]);
            }
            let adapter = Adapter { down, up, scale: lora.scale, dropout: lora.dropout };
            let before = self.adapters.insert(base.weight, adapter);
            assert!(before.is_none(), "a linear map has one adapter");
        }
    }

    /// A module below that of a linear map.
    fn low_rank(&mut self, parent: usize, name: &str, [inputs, outputs]: [usize; 2], init: Init) -> Linear {
        let spec = &mut self.spec;
        let (fqn, weight) = (format!("{}.{name}", spec.modules[parent].fqn), ParamId(spec.params.len()));
        let (shape, aliases) = (vec![outputs, inputs], Vec::new());
        spec.params.push(ParamSpec { fqn: format!("{fqn}.weight"), aliases, shape, trainable: true });
        self.init.push(init);
        let (class, parent, params) = ("Linear".to_owned(), Some(parent), vec![weight]);
        spec.modules.push(ModuleSpec { fqn, class, parent, params });
        Linear { weight, bias: None, inputs, outputs, orientation: Orientation::OutIn }
    }
}
