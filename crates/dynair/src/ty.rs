//! Types of values: shapes with symbolic token and output counts.

use std::fmt;

use crate::dtype::DType;
use crate::graph::CacheId;

/// One dimension of a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dim {
    /// A number known when the graph is built.
    Fixed(usize),
    /// `T`: the tokens of a step.
    Tokens,
    /// `R`: the rows of a step whose logits are wanted.
    Outputs,
}

/// Up to three dimensions, row-major. Only dimension 0 may be symbolic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [Dim; 3],
    rank: u8,
}

impl Shape {
    /// A shape of one to three dimensions.
    ///
    /// # Panics
    /// If there are none or more than three, or a symbolic dimension stands anywhere but first.
    pub fn new(dims: &[Dim]) -> Shape {
        assert!(
            (1..=3).contains(&dims.len()),
            "a shape has one to three dimensions"
        );
        assert!(
            dims[1..].iter().all(|d| matches!(d, Dim::Fixed(_))),
            "only the first dimension of a shape may be symbolic"
        );
        let mut all = [Dim::Fixed(1); 3];
        all[..dims.len()].copy_from_slice(dims);
        Shape {
            dims: all,
            rank: dims.len() as u8,
        }
    }

    /// The dimensions.
    pub fn dims(&self) -> &[Dim] {
        &self.dims[..self.rank as usize]
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// The leading dimension.
    pub fn rows(&self) -> Dim {
        self.dims[0]
    }

    /// The last dimension; 1 if it is the symbolic one.
    pub fn cols(&self) -> usize {
        match self.dims()[self.rank() - 1] {
            Dim::Fixed(n) => n,
            Dim::Tokens | Dim::Outputs => 1,
        }
    }

    /// Product of all dimensions but the first: the elements one row of the leading dimension takes.
    pub fn row_elements(&self) -> usize {
        self.dims()[1..]
            .iter()
            .map(|d| if let Dim::Fixed(n) = d { *n } else { 1 })
            .product()
    }

    /// Elements in all, with the symbols bound to `tokens` and `outputs`.
    pub fn elements(&self, tokens: usize, outputs: usize) -> usize {
        self.rows().bind(tokens, outputs) * self.row_elements()
    }
}

impl Dim {
    /// The number this dimension has in a step of `tokens` tokens and `outputs` output rows.
    pub fn bind(self, tokens: usize, outputs: usize) -> usize {
        match self {
            Dim::Fixed(n) => n,
            Dim::Tokens => tokens,
            Dim::Outputs => outputs,
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(n) => write!(f, "{n}"),
            Dim::Tokens => f.write_str("T"),
            Dim::Outputs => f.write_str("R"),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.dims().iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{d}")?;
        }
        f.write_str("]")
    }
}

/// Element type and shape of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Shape, row-major.
    pub shape: Shape,
}

impl TensorType {
    /// An f32 tensor, which is what every activation is.
    pub fn f32(dims: &[Dim]) -> TensorType {
        TensorType {
            dtype: DType::F32,
            shape: Shape::new(dims),
        }
    }

    /// Bytes the tensor takes, row-major, with the symbols bound; `None` if a row is no whole number of blocks or the
    /// number overflows. A vector is one row.
    pub fn bytes(&self, tokens: usize, outputs: usize) -> Option<usize> {
        let cols = match self.shape.dims() {
            [Dim::Fixed(n)] => return self.dtype.row_bytes(*n),
            _ => self.shape.cols(),
        };
        let mut rows = 1usize;
        for d in &self.shape.dims()[..(self.shape.rank() - 1).max(1)] {
            rows = rows.checked_mul(d.bind(tokens, outputs))?;
        }
        rows.checked_mul(self.dtype.row_bytes(cols)?)
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}

/// What an edge of the graph carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ValueType {
    /// A tensor.
    Tensor(TensorType),
    /// The step's [`BatchMeta`](crate::BatchMeta).
    Batch,
    /// One version of a layer's cache; `KvWrite` makes the next version.
    Cache(CacheId),
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValueType::Tensor(t) => write!(f, "{t}"),
            ValueType::Batch => f.write_str("batch"),
            ValueType::Cache(c) => write!(f, "cache{}", c.0),
        }
    }
}
