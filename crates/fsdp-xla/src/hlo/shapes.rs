//! Operations that move elements, and on table rows.

use std::ops::Range;

use super::{Builder, Element, Shape, Value, list};

impl Builder {
    /// Changes dimensions; the number of elements stays the same.
    pub(crate) fn reshape(&mut self, x: &Value, dims: &[usize]) -> Value {
        if x.dims() == dims {
            return x.clone();
        }
        let shape = Shape::new(dims, x.element());
        assert_eq!(x.len(), shape.len(), "{} becomes {shape}", x.shape);
        self.push(shape.clone(), format_args!("stablehlo.reshape {} : ({}) -> {shape}", x.name, x.shape))
    }

    /// A tensor in which each element is its index along a dimension.
    pub(crate) fn iota(&mut self, dims: &[usize], dim: usize, element: Element) -> Value {
        let shape = Shape::new(dims, element);
        self.push(shape.clone(), format_args!("stablehlo.iota dim = {dim} : {shape}"))
    }

    /// Repeats elements: dimension `i` of `x` becomes dimension `to[i]`.
    pub(crate) fn broadcast(&mut self, x: &Value, to: &[usize], dims: &[usize]) -> Value {
        if x.dims() == dims {
            return x.clone();
        }
        let shape = Shape::new(dims, x.element());
        let fits = |(&dim, &to): (&usize, &usize)| dims.get(to).is_some_and(|&size| dim == size || dim == 1);
        assert!(
            to.len() == x.dims().len() && x.dims().iter().zip(to).all(fits),
            "{} becomes {shape}",
            x.shape
        );
        let text = format_args!(
            "stablehlo.broadcast_in_dim {}, dims = [{}] : ({}) -> {shape}",
            x.name,
            list(to),
            x.shape
        );
        self.push(shape.clone(), text)
    }

    /// Broadcasts one number to all elements.
    pub(crate) fn fill(&mut self, number: &Value, dims: &[usize]) -> Value {
        let number = self.reshape(number, &[]);
        self.broadcast(&number, &[], dims)
    }

    /// Transposes: dimension `i` of the result is dimension `order[i]` of `x`.
    pub(crate) fn transpose(&mut self, x: &Value, order: &[usize]) -> Value {
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        assert!(sorted.iter().copied().eq(0..x.dims().len()), "{} in the order {order:?}", x.shape);
        let shape = Shape { dims: order.iter().map(|&dim| x.dims()[dim]).collect(), element: x.element() };
        let text = format_args!(
            "stablehlo.transpose {}, dims = [{}] : ({}) -> {shape}",
            x.name,
            list(order),
            x.shape
        );
        self.push(shape.clone(), text)
    }

    /// Reverses the order along a dimension.
    pub(crate) fn reverse(&mut self, x: &Value, dim: usize) -> Value {
        assert!(dim < x.dims().len(), "{} has no dimension {dim}", x.shape);
        let shape = x.shape.clone();
        self.push(shape.clone(), format_args!("stablehlo.reverse {}, dims = [{dim}] : {shape}", x.name))
    }

    /// Slices a range of each dimension.
    pub(crate) fn slice(&mut self, x: &Value, ranges: &[Range<usize>]) -> Value {
        let is_within = |(range, &dim): (&Range<usize>, &usize)| range.start <= range.end && range.end <= dim;
        assert!(
            ranges.len() == x.dims().len() && ranges.iter().zip(x.dims()).all(is_within),
            "{ranges:?} of {}",
            x.shape
        );
        if ranges.iter().zip(x.dims()).all(|(range, &dim)| *range == (0..dim)) {
            return x.clone();
        }
        let shape = Shape { dims: ranges.iter().map(ExactSizeIterator::len).collect(), element: x.element() };
        let spec = list(ranges.iter().map(|range| format!("{}:{}", range.start, range.end)));
        self.push(
            shape.clone(),
            format_args!("stablehlo.slice {} [{spec}] : ({}) -> {shape}", x.name, x.shape),
        )
    }

    /// Slices a range of a vector.
    pub(crate) fn range(&mut self, x: &Value, range: Range<usize>) -> Value {
        self.slice(x, std::slice::from_ref(&range))
    }

    /// Slices columns of a matrix.
    pub(crate) fn columns(&mut self, x: &Value, columns: Range<usize>) -> Value {
        let rows = x.dims()[0];
        self.slice(x, &[0..rows, columns])
    }

    /// Slices `sizes` elements of each dimension, at start indices computed at run time; a dimension without one starts
    /// at 0. Start indices are clamped to the last valid one.
    pub(crate) fn dynamic_slice(&mut self, x: &Value, starts: &[(usize, &Value)], sizes: &[usize]) -> Value {
        let shape = Shape::new(sizes, x.element());
        assert!(shape.is_within(&x.shape), "{shape} of {}", x.shape);
        let (names, shapes) = self.starts(x, starts);
        let text = format_args!(
            "stablehlo.dynamic_slice {}, {names}, sizes = [{}] : ({}, {shapes}) -> {shape}",
            x.name,
            list(sizes),
            x.shape
        );
        self.push(shape.clone(), text)
    }

    /// Replaces the elements that [`Builder::dynamic_slice`] would read by `part`.
    pub(crate) fn dynamic_update(&mut self, x: &Value, part: &Value, starts: &[(usize, &Value)]) -> Value {
        assert!(part.shape.is_within(&x.shape), "{} of {}", part.shape, x.shape);
        let (names, shapes) = self.starts(x, starts);
        let text = format_args!(
            "stablehlo.dynamic_update_slice {}, {}, {names} : ({}, {}, {shapes}) -> {}",
            x.name, part.name, x.shape, part.shape, x.shape
        );
        self.push(x.shape.clone(), text)
    }

    /// Names and shapes of the start indices of all dimensions; 0 where none is given.
    fn starts(&mut self, x: &Value, given: &[(usize, &Value)]) -> (String, String) {
        let element = given.first().map_or(Element::I32, |(_, start)| start.element());
        let mut all = Vec::new();
        for dim in 0..x.dims().len() {
            let start =
                given.iter().find(|(start_dim, _)| *start_dim == dim).map(|&(_, start)| start.clone());
            all.push(start.unwrap_or_else(|| self.int(0, &[], element)));
        }
        (list(all.iter().map(|start| start.name)), list(all.iter().map(|start| &start.shape)))
    }

    /// Concatenates along a dimension.
    pub(crate) fn concatenate(&mut self, parts: &[Value], dim: usize) -> Value {
        if let [part] = parts {
            return part.clone();
        }
        let mut shape = parts[0].shape.clone();
        shape.dims[dim] = parts.iter().map(|part| part.dims()[dim]).sum();
        let fits = |part: &Value| {
            let mut resized = part.shape.clone();
            resized.dims[dim] = shape.dims[dim];
            resized == shape
        };
        assert!(parts.iter().all(fits), "parts of {shape}");
        let names = list(parts.iter().map(|part| part.name));
        let shapes = list(parts.iter().map(|part| &part.shape));
        let text = format_args!("stablehlo.concatenate {names}, dim = {dim} : ({shapes}) -> {shape}");
        self.push(shape.clone(), text)
    }

    /// Replaces the elements of `x` from these indices on by `part`.
    pub(crate) fn update(&mut self, x: &Value, part: &Value, at: &[usize]) -> Value {
        let starts: Vec<Value> = at.iter().map(|&start| self.int(start as i64, &[], Element::I32)).collect();
        let starts: Vec<(usize, &Value)> = starts.iter().enumerate().collect();
        self.dynamic_update(x, part, &starts)
    }

    /// Looks up element `ids[i]` of a vector, for each `i`.
    pub(crate) fn gather(&mut self, x: &Value, ids: &Value) -> Value {
        let table = self.reshape(x, &[x.len(), 1]);
        let found = self.gather_rows(&table, ids);
        self.reshape(&found, &[ids.len()])
    }

    /// Looks up row `ids[i]` of a table, for each `i`; indices past the end read the last row.
    pub(crate) fn gather_rows(&mut self, table: &Value, ids: &Value) -> Value {
        let (rows, width) = (ids.len(), table.dims()[1]);
        let ids = self.reshape(ids, &[rows, 1]);
        let shape = Shape::new(&[rows, width], table.element());
        let text = format_args!(
            "\"stablehlo.gather\"({}, {}) <{{dimension_numbers = #stablehlo.gather<offset_dims = [1], \
             collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, {width}>, \
             indices_are_sorted = false}}> : ({}, {}) -> {shape}",
            table.name, ids.name, table.shape, ids.shape
        );
        self.push(shape.clone(), text)
    }

    /// Adds row `i` of `rows` to row `ids[i]` of a table; rows with an index past the end are dropped.
    pub(crate) fn add_to_rows(&mut self, table: &Value, ids: &Value, rows: &Value) -> Value {
        assert_eq!(
            rows.shape,
            Shape::new(&[ids.len(), table.dims()[1]], table.element()),
            "a row for each index"
        );
        let ids = self.reshape(ids, &[ids.len(), 1]);
        let number = Shape::new(&[], table.element());
        let text = format_args!(
            "\"stablehlo.scatter\"({}, {}, {}) <{{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], \
             inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>, \
             indices_are_sorted = false, unique_indices = false}}> ({{\n    ^bb0(%a: {number}, %b: {number}):\n      \
             %s = stablehlo.add %a, %b : {number}\n      stablehlo.return %s : {number}\n    }}) : ({}, {}, {}) -> {}",
            table.name, ids.name, rows.name, table.shape, ids.shape, rows.shape, table.shape
        );
        self.push(table.shape.clone(), text)
    }
}
