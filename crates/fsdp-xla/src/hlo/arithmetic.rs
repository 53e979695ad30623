//! Elementwise operations, reductions and products.

use super::{Builder, Element, Shape, Value, list};

/// The batch and contracting dimensions of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product<'a> {
    /// Batch dimensions of each operand.
    pub(crate) batch: [&'a [usize]; 2],
    /// Contracting dimensions of each operand.
    pub(crate) contract: [&'a [usize]; 2],
}

impl Builder {
    /// An elementwise operation on one operand.
    pub(crate) fn unary(&mut self, op: &str, x: &Value) -> Value {
        self.push(x.shape.clone(), format_args!("stablehlo.{op} {} : {}", x.name, x.shape))
    }

    /// An elementwise operation on two operands of the same shape.
    pub(crate) fn binary(&mut self, op: &str, a: &Value, b: &Value) -> Value {
        assert_eq!(a.shape, b.shape, "{op} of operands of one shape");
        self.push(a.shape.clone(), format_args!("stablehlo.{op} {}, {} : {}", a.name, b.name, a.shape))
    }

    pub(crate) fn add(&mut self, a: &Value, b: &Value) -> Value {
        self.binary("add", a, b)
    }

    pub(crate) fn subtract(&mut self, a: &Value, b: &Value) -> Value {
        self.binary("subtract", a, b)
    }

    pub(crate) fn multiply(&mut self, a: &Value, b: &Value) -> Value {
        self.binary("multiply", a, b)
    }

    pub(crate) fn divide(&mut self, a: &Value, b: &Value) -> Value {
        self.binary("divide", a, b)
    }

    /// `x op number`, in the type of `x`.
    pub(crate) fn with(&mut self, op: &str, x: &Value, number: f64) -> Value {
        let number = self.float(number, x.dims(), x.element());
        self.binary(op, x, &number)
    }

    /// `x op number`, for integers.
    pub(crate) fn with_int(&mut self, op: &str, x: &Value, number: i64) -> Value {
        let number = self.int(number, x.dims(), x.element());
        self.binary(op, x, &number)
    }

    /// Converts elements to another type.
    pub(crate) fn convert(&mut self, x: &Value, element: Element) -> Value {
        if x.element() == element {
            return x.clone();
        }
        let shape = Shape::new(x.dims(), element);
        self.push(shape.clone(), format_args!("stablehlo.convert {} : ({}) -> {shape}", x.name, x.shape))
    }

    /// Converts to the type of arithmetic.
    pub(crate) fn master(&mut self, x: &Value) -> Value {
        self.convert(x, x.element().master())
    }

    /// Compares elementwise: `EQ`, `LT`, `GE`, ...
    pub(crate) fn compare(&mut self, direction: &str, a: &Value, b: &Value) -> Value {
        assert_eq!(a.shape, b.shape, "operands of one shape are compared");
        let shape = Shape::new(a.dims(), Element::Bool);
        let text = format_args!(
            "stablehlo.compare {direction}, {}, {} : ({}, {}) -> {shape}",
            a.name, b.name, a.shape, b.shape
        );
        self.push(shape.clone(), text)
    }

    /// `a` where the condition holds, else `b`. The condition has the same dimensions, or none.
    pub(crate) fn select(&mut self, condition: &Value, a: &Value, b: &Value) -> Value {
        assert_eq!(a.shape, b.shape, "one of two operands of one shape is selected");
        let is_single = condition.dims().is_empty();
        assert!(is_single || condition.dims() == a.dims(), "{} is selected by {}", a.shape, condition.shape);
        let text = format_args!(
            "stablehlo.select {}, {}, {} : {}, {}",
            condition.name, a.name, b.name, condition.shape, a.shape
        );
        self.push(a.shape.clone(), text)
    }

    /// Sums over dimensions, which are removed.
    pub(crate) fn sum(&mut self, x: &Value, axes: &[usize]) -> Value {
        let start = self.zeros(&[], x.element());
        self.reduce("add", &start, x, axes)
    }

    /// The maximum of floats over dimensions, which are removed.
    pub(crate) fn largest(&mut self, x: &Value, axes: &[usize]) -> Value {
        let start = self.float(f64::NEG_INFINITY, &[], x.element());
        self.reduce("maximum", &start, x, axes)
    }

    fn reduce(&mut self, op: &str, start: &Value, x: &Value, axes: &[usize]) -> Value {
        assert!(axes.iter().all(|&dim| dim < x.dims().len()), "over {axes:?} of {}", x.shape);
        let kept = (0..x.dims().len()).filter(|dim| !axes.contains(dim)).map(|dim| x.dims()[dim]);
        let shape = Shape { dims: kept.collect(), element: x.element() };
        let text = format_args!(
            "stablehlo.reduce({} init: {}) applies stablehlo.{op} across dimensions = [{}] : ({}, {}) -> {shape}",
            x.name,
            start.name,
            list(axes),
            x.shape,
            start.shape
        );
        self.push(shape.clone(), text)
    }

    /// The sum of all rows of a matrix.
    pub(crate) fn sum_rows(&mut self, x: &Value) -> Value {
        self.sum(x, &[0])
    }

    /// A general product. Batch dimensions come first, then the remaining ones of `a`, then those of `b`.
    pub(crate) fn dot(&mut self, a: &Value, b: &Value, product: Product<'_>, element: Element) -> Value {
        let Product { batch, contract } = product;
        let free_dims = |value: &Value, side: usize| -> Vec<usize> {
            let is_free = |dim: &usize| !batch[side].contains(dim) && !contract[side].contains(dim);
            (0..value.dims().len()).filter(is_free).map(|dim| value.dims()[dim]).collect()
        };
        let sizes = |value: &Value, dims: &[usize]| -> Vec<usize> {
            dims.iter().map(|&dim| value.dims()[dim]).collect()
        };
        for [of_a, of_b] in [batch, contract] {
            assert_eq!(sizes(a, of_a), sizes(b, of_b), "{product:?} of {} and {}", a.shape, b.shape);
        }
        let mut dims: Vec<usize> = batch[0].iter().map(|&dim| a.dims()[dim]).collect();
        dims.extend(free_dims(a, 0));
        dims.extend(free_dims(b, 1));
        let shape = Shape { dims, element };
        let batching = match batch[0] {
            [] => String::new(),
            _ => format!("batching_dims = [{}] x [{}], ", list(batch[0]), list(batch[1])),
        };
        // TPUs compute single-precision products from narrower ones unless full precision is requested.
        let precision = if a.element().is_narrow() { "" } else { ", precision = [HIGHEST, HIGHEST]" };
        let text = format_args!(
            "stablehlo.dot_general {}, {}, {batching}contracting_dims = [{}] x [{}]{precision} : ({}, {}) -> {shape}",
            a.name,
            b.name,
            list(contract[0]),
            list(contract[1]),
            a.shape,
            b.shape
        );
        self.push(shape.clone(), text)
    }

    /// The product of two matrices, contracted over one dimension of each.
    pub(crate) fn matmul(&mut self, a: &Value, b: &Value, contracted: [usize; 2], element: Element) -> Value {
        let product = Product { batch: [&[], &[]], contract: [&[contracted[0]], &[contracted[1]]] };
        self.dot(a, b, product, element)
    }
}

impl Builder {
    /// The complementary error function: a CHLO operation, which every StableHLO compiler accepts.
    pub(crate) fn erfc(&mut self, x: &Value) -> Value {
        self.push(x.shape.clone(), format_args!("chlo.erfc {} : {} -> {}", x.name, x.shape, x.shape))
    }
}
