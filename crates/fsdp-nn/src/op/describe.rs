//! The description of an operation: its name, operands and work.

use fsdp_core::DType;

/// The dtype of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The float dtype shared by all values of a call.
    Value,
    /// The master dtype of the values.
    Statistic,
    /// Any float dtype; gradient slots have their own.
    Gradient,
    /// A fixed dtype.
    Of(DType),
}

/// How an operand is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read.
    Read,
    /// Overwritten.
    Overwrite,
    /// Overwritten, or added to if the call says so.
    Add,
    /// Read, then overwritten.
    Update,
    /// Scratch: contents before and after do not matter.
    Scratch,
}

/// The description of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Role {
    /// Name of the operand.
    pub name: &'static str,
    /// Number of elements.
    pub len: usize,
    /// Whether the operand may have more elements.
    pub or_more: bool,
    /// Number of elements accessed. Differs from `len` for lookup tables and for scratch that is reused.
    pub touched: usize,
    /// The dtype of the elements.
    pub kind: Kind,
    /// How the operand is accessed.
    pub access: Access,
}

impl Role {
    fn new(name: &'static str, len: usize, kind: Kind) -> Self {
        Self { name, len, or_more: false, touched: len, kind, access: Access::Read }
    }

    /// Elements of the dtype shared by all values of the call.
    pub(super) fn value(name: &'static str, len: usize) -> Self {
        Self::new(name, len, Kind::Value)
    }

    /// Elements of the master dtype.
    pub(super) fn statistic(name: &'static str, len: usize) -> Self {
        Self::new(name, len, Kind::Statistic)
    }

    /// Elements of any float dtype.
    pub(super) fn gradient(name: &'static str, len: usize) -> Self {
        Self::new(name, len, Kind::Gradient)
    }

    /// Tokens, classes or positions.
    pub(super) fn ids(name: &'static str, len: usize) -> Self {
        Self::new(name, len, Kind::Of(DType::U32))
    }

    /// Bytes that encode numbers.
    pub(super) fn bytes(name: &'static str, len: usize) -> Self {
        Self::new(name, len, Kind::Of(DType::U8))
    }

    /// One loss per row.
    pub(super) fn losses(rows: usize) -> Self {
        Self::double("losses", rows)
    }

    /// Elements in double precision, independent of the dtype of values.
    pub(super) fn double(name: &'static str, len: usize) -> Self {
        Self::new(name, len, Kind::Of(DType::F64))
    }

    pub(super) fn touching(self, touched: usize) -> Self {
        Self { touched, ..self }
    }

    /// Allows more elements, and sets the number accessed.
    pub(super) fn or_more(self, touched: usize) -> Self {
        Self { or_more: true, touched, ..self }
    }

    /// The call decides between overwriting and adding.
    pub(super) fn adds(self) -> Self {
        Self { access: Access::Add, ..self }
    }

    pub(super) fn updated(self) -> Self {
        Self { access: Access::Update, ..self }
    }

    pub(super) fn scratch(self) -> Self {
        Self { access: Access::Scratch, ..self }
    }
}

/// The description of an operation, built up by chained methods.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// Name in listings, traces and errors.
    pub name: &'static str,
    /// Operands that are only read, in order.
    pub reads: Vec<Role>,
    /// Operands that are written, in order.
    pub writes: Vec<Role>,
    /// The matrix product that the operation is or consists of, as `[m, n, k]`: rows, columns and terms per sum.
    /// `None` if it is not a product.
    pub matmul: Option<[usize; 3]>,
    /// Constants of the formula, which kernels take beside operands and sizes.
    pub constants: Vec<f64>,
    /// Floating-point operations of matrix products.
    pub(super) product_flops: u64,
    /// Other floating-point operations.
    pub(super) other_flops: u64,
    /// Number of dropout keys: one per sample, or 0 if nothing is dropped.
    pub(super) keys: usize,
    /// Number of rows that the documents cover; 0 if the operation does not use documents.
    pub(super) document_rows: usize,
    /// Number of rows for which the operation must know whether they count; 0 if it does not use that.
    pub(super) counted_rows: usize,
    /// Whether backward recomputes the output, instead of forward keeping it.
    pub(crate) is_recomputed: bool,
}

impl Description {
    pub(super) fn new(name: &'static str) -> Self {
        let (reads, writes) = (Vec::new(), Vec::new());
        Self {
            name,
            reads,
            writes,
            matmul: None,
            constants: Vec::new(),
            product_flops: 0,
            other_flops: 0,
            keys: 0,
            document_rows: 0,
            counted_rows: 0,
            is_recomputed: false,
        }
    }

    pub(super) fn read(mut self, roles: impl IntoIterator<Item = Role>) -> Self {
        self.reads.extend(roles);
        self
    }

    /// Adds written operands; those without another access are overwritten.
    pub(super) fn write(mut self, roles: impl IntoIterator<Item = Role>) -> Self {
        self.writes.extend(roles.into_iter().map(|role| match role.access {
            Access::Read => Role { access: Access::Overwrite, ..role },
            _ => role,
        }));
        self
    }

    pub(super) fn constant(mut self, value: f64) -> Self {
        self.constants.push(value);
        self
    }

    /// Sets the work to `count` products of `m x k` with `k x n` matrices.
    pub(super) fn products(self, count: u64, [m, n, k]: [usize; 3]) -> Self {
        Self { matmul: Some([m, n, k]), ..self }.product_flops(count * 2 * (m * n * k) as u64)
    }

    pub(super) fn product_flops(self, product_flops: u64) -> Self {
        Self { product_flops, ..self }
    }

    /// Sets the approximate work outside of products: one operation per arithmetic function of an element.
    pub(super) fn flops(self, count: usize) -> Self {
        Self { other_flops: count as u64, ..self }
    }

    /// Declares dropout with probability `p` over `samples` samples.
    pub(super) fn drops(self, p: f64, samples: usize) -> Self {
        Self { keys: if p > 0.0 { samples } else { 0 }, ..self }
    }

    /// Declares that the operation needs the documents, over `document_rows` rows.
    pub(super) fn of_documents(self, document_rows: usize) -> Self {
        Self { document_rows, ..self }
    }

    /// Declares that the operation needs to know which of `counted_rows` rows count.
    pub(super) fn of_counted(self, counted_rows: usize) -> Self {
        Self { counted_rows, ..self }
    }

    pub(super) fn recomputed(self) -> Self {
        Self { is_recomputed: true, ..self }
    }

    /// Whether the operation computes products; selective checkpointing keeps their outputs.
    pub(crate) fn is_product(&self) -> bool {
        self.product_flops > 0
    }
}
