//! Activations: functions of single elements, optionally gating another element.

use fsdp_core::Error;

use super::describe::{Description, Role};
use crate::graph::{Backward, Builder, Call, Node, Tensor};
use crate::op::Op;

/// An element-wise function. Device kernels identify it by its index in this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// `x * logistic(x)`.
    Silu,
    /// GELU in the tanh form (`gelu_new`, `gelu_pytorch_tanh`).
    GeluTanh,
    /// GELU: `x` times the standard normal distribution function at `x` (Hendrycks and Gimpel, 2016).
    Gelu,
    /// `max(x, 0)`.
    Relu,
    /// `z * logistic(1.702 z)` with `z = min(x, 7)`: the gate of gpt-oss.
    ClampedSwish,
    /// `min(max(x, -7), 7) + 1`: what the gate of gpt-oss multiplies.
    ClampedPlusOne,
    /// The logistic function: the gate of what rows attend to in Qwen 3 Next.
    Logistic,
}

/// The bound of [`Function::ClampedSwish`] and [`Function::ClampedPlusOne`].
pub const CLAMP: f64 = 7.0;

/// The factor in [`Function::ClampedSwish`].
pub const SWISH_SCALE: f64 = 1.702;

impl Function {
    /// Floating-point operations of the function, and of the function together with its derivative.
    fn flops(self) -> [usize; 2] {
        match self {
            Function::Silu => [4, 7],
            Function::GeluTanh => [9, 15],
            Function::Gelu => [5, 10],
            Function::Relu => [1, 2],
            Function::ClampedSwish => [6, 10],
            Function::ClampedPlusOne => [3, 5],
            Function::Logistic => [3, 5],
        }
    }
}

/// The pass of an activation to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Computes `y`.
    Forward,
    /// Computes the gradients of the inputs.
    Backward,
    /// [`Pass::Backward`] that also replaces `dy` by the output of forward, for a caller that did not keep it.
    BackwardRecompute,
}

/// `y = function(x)`, or `y = function(gate) * up` if `gated`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "sizes are what they are called")]
pub struct Activation {
    pub function: Function,
    pub gated: bool,
    pub len: usize,
    pub pass: Pass,
}

/// The names of the three passes.
macro_rules! names {
    ($name:literal) => {
        [$name, concat!($name, "_backward"), concat!($name, "_backward_again")]
    };
}

impl Activation {
    fn names(&self) -> [&'static str; 3] {
        match (self.function, self.gated) {
            (Function::Silu, false) => names!("silu"),
            (Function::Silu, true) => names!("swiglu"),
            (Function::GeluTanh, false) => names!("gelu"),
            (Function::GeluTanh, true) => names!("geglu"),
            (Function::Gelu, false) => names!("gelu_erf"),
            (Function::Gelu, true) => names!("geglu_erf"),
            (Function::Relu, false) => names!("relu"),
            (Function::Relu, true) => names!("reglu"),
            (Function::ClampedSwish, false) => names!("clamped_swish"),
            (Function::ClampedSwish, true) => names!("clamped_swiglu"),
            (Function::ClampedPlusOne, false) => names!("clamped_plus_one"),
            (Function::ClampedPlusOne, true) => names!("clamped_plus_one_gate"),
            (Function::Logistic, false) => names!("logistic"),
            (Function::Logistic, true) => names!("glu"),
        }
    }

    pub(super) fn describe(&self) -> Description {
        let (inputs, slopes) =
            if self.gated { (&["gate", "up"][..], &["dgate", "dup"][..]) } else { (&["x"][..], &["dx"][..]) };
        let role = |name| Role::value(name, self.len);
        let roles = |names: &'static [&'static str]| names.iter().map(move |name| role(name));
        let [forward, both] = self.function.flops();
        let (gate, gates) = if self.gated { (1, 2) } else { (0, 0) };
        let (forward, backward) = ((forward + gate) * self.len, (both + 1 + gates) * self.len);
        let of = Description::new(self.names()[self.pass as usize]).read(roles(inputs));
        match self.pass {
            Pass::Forward => of.write([role("y")]).flops(forward).recomputed(),
            Pass::Backward => of.read([role("dy")]).write(roles(slopes)).flops(backward),
            Pass::BackwardRecompute => of.write([role("dy").updated()]).write(roles(slopes)).flops(backward),
        }
    }
}

pub(super) fn derive(b: &mut Backward<'_>, node: &Node, output: usize) {
    let Some(dy) = b.take(output) else { return };
    add_backward(b, node, dy, Pass::Backward);
}

/// Derives the backward of an activation whose output is `output`. The recomputed output replaces its gradient;
/// returns that place.
pub(super) fn derive_recomputing(b: &mut Backward<'_>, node: &Node, output: usize) -> usize {
    let dy = b.gradients[output].take().expect("the gradient was just computed");
    add_backward(b, node, dy, Pass::BackwardRecompute);
    dy
}

fn add_backward(b: &mut Backward<'_>, node: &Node, dy: usize, pass: Pass) {
    let call = node.main();
    let Op::Activation(op) = call.op else { unreachable!("{} is not an activation", call.op.name()) };
    let inputs: Vec<usize> = node.reads().collect();
    let mut reads: Vec<_> = call.reads.iter().map(|read| b.load_operand(*read)).collect();
    let slopes: Vec<usize> = if op.gated {
        inputs.iter().map(|input| b.temporary(*input)).collect()
    } else {
        b.overwrite(inputs[0]).into_iter().collect()
    };
    if slopes.is_empty() {
        return;
    }
    let mut writes = Vec::new();
    match pass {
        Pass::BackwardRecompute => writes.push((b.draft.whole(dy), false)),
        _ => reads.push(b.draft.whole(dy)),
    }
    writes.extend(slopes.iter().map(|slope| (b.draft.whole(*slope), false)));
    b.draft.call(Op::Activation(Activation { pass, ..op }), reads, writes);
    for (input, slope) in inputs.into_iter().zip(slopes) {
        b.put(input, slope);
    }
}

impl Builder<'_> {
    /// `function(x)`.
    pub fn activation(&mut self, function: Function, x: Tensor) -> Tensor {
        self.activated(function, &[x])
    }

    /// `function(gate) * up`: SwiGLU, GeGLU (Shazeer, 2020).
    ///
    /// # Errors
    /// If the widths differ.
    pub fn gated(&mut self, function: Function, gate: Tensor, up: Tensor) -> Result<Tensor, Error> {
        self.check("gate", gate, up.width())?;
        Ok(self.activated(function, &[gate, up]))
    }

    fn activated(&mut self, function: Function, inputs: &[Tensor]) -> Tensor {
        let y = self.rows(inputs[0].width());
        let (gated, len) = (inputs.len() == 2, self.row_count() * y.width());
        let op = Op::Activation(Activation { function, gated, len, pass: Pass::Forward });
        let reads = inputs.iter().map(|x| self.whole(*x)).collect();
        self.node(vec![Call::new(op, reads, [(self.whole(y), false)])], None);
        y
    }
}

#[cfg(test)]
mod tests {
    use fsdp_core::DType;

    use super::*;

    #[test]
    fn gate_adds_one_forward_and_two_backward_products() {
        for (function, forward, backward) in
            [(Function::Silu, 4, 8), (Function::GeluTanh, 9, 16), (Function::Gelu, 5, 11)]
        {
            let cost = |gated, pass| {
                Op::Activation(Activation { function, gated, len: 6, pass }).cost(DType::Bf16, DType::F32)
            };
            let flops = |gated, pass| cost(gated, pass).flops();
            assert_eq!(flops(false, Pass::Forward), 6 * forward);
            assert_eq!(flops(true, Pass::Forward), 6 * (forward + 1));
            assert_eq!(flops(false, Pass::Backward), 6 * backward);
            assert_eq!(flops(true, Pass::Backward), 6 * (backward + 2));
            // Two bytes for each element of x, dy and dx; or of gate, up, dy and both gradients.
            assert_eq!(cost(false, Pass::Backward).bytes(), 2 * 6 * 3);
            assert_eq!(cost(true, Pass::Backward).bytes(), 2 * 6 * 5);
            // The output that replaces dy: dy is read and written.
            assert_eq!(cost(true, Pass::BackwardRecompute).bytes(), 2 * 6 * 6);
        }
    }
}
