//! The parser of the text form: a scanner over one line at a time.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{CacheDecl, CacheId, Graph, Node, ValueId, WeightDecl, WeightId};
use crate::op::{
    Activation, AttnSpec, ExpertWeights, FusedOp, Op, RopeScaling, RopeSpec, RopeStyle, RouterSpec,
};
use crate::ty::{Dim, Shape, TensorType, ValueType};
use crate::verify;

/// Parses the text form of a graph.
///
/// # Errors
/// [`Error::Parse`] with the line, what was found and what was expected.
pub fn parse(text: &str) -> Result<Graph> {
    let mut parser = Parser {
        graph: Graph::default(),
        types: Vec::new(),
        most_values: text.len(),
    };
    for (i, line) in text.lines().enumerate() {
        let mut scan = Scan { rest: line };
        scan.skip();
        if !scan.rest.is_empty() {
            parser
                .line(&mut scan)
                .map_err(|detail| Error::Parse { line: i + 1, detail })?;
        }
    }
    let types = parser.types.into_iter().enumerate();
    let values: Result<Vec<ValueType>, String> = types
        .map(|(i, t)| t.ok_or_else(|| format!("%{i} is used or skipped but has no type")))
        .collect();
    parser.graph.values = values.map_err(|detail| Error::Parse {
        line: text.lines().count().max(1),
        detail,
    })?;
    Ok(parser.graph)
}

type Scanned<T> = std::result::Result<T, String>;

struct Scan<'a> {
    rest: &'a str,
}

impl<'a> Scan<'a> {
    /// Skips blanks and a comment.
    fn skip(&mut self) {
        self.rest = self.rest.trim_start();
        if self.rest.starts_with(';') {
            self.rest = "";
        }
    }

    fn found(&self) -> String {
        if self.rest.is_empty() {
            return "the end of the line".to_string();
        }
        format!("`{}`", self.rest.chars().take(24).collect::<String>())
    }

    fn expected<T>(&self, what: impl std::fmt::Display) -> Scanned<T> {
        Err(format!("expected {what}, found {}", self.found()))
    }

    /// Takes `token` if it comes next.
    fn eat(&mut self, token: &str) -> bool {
        self.skip();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn want(&mut self, token: &str) -> Scanned<()> {
        if self.eat(token) {
            Ok(())
        } else {
            self.expected(format_args!("`{token}`"))
        }
    }

    fn take(&mut self, fits: impl Fn(char) -> bool) -> &'a str {
        self.skip();
        let end = self.rest.find(|c| !fits(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word
    }

    fn word(&mut self) -> Scanned<&'a str> {
        match self.take(|c| c.is_ascii_alphanumeric() || c == '_') {
            "" => self.expected("a word"),
            word => Ok(word),
        }
    }

    fn number<T: std::str::FromStr>(&mut self, what: &str) -> Scanned<T> {
        let before = Scan { rest: self.rest };
        let word = self.take(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+'));
        word.parse().or_else(|_| before.expected(what))
    }

    fn index(&mut self, prefix: &str) -> Scanned<u32> {
        self.want(prefix)?;
        self.number("a number")
    }

    /// `name=` and a number.
    fn param<T: std::str::FromStr>(&mut self, name: &str) -> Scanned<T> {
        self.want(name)?;
        self.want("=")?;
        self.number("a number")
    }

    /// `, name=` and a number, if it comes next.
    fn optional<T: std::str::FromStr>(&mut self, name: &str) -> Scanned<Option<T>> {
        let saved = self.rest;
        if self.eat(",") && self.eat(name) {
            self.want("=")?;
            return self.number("a number").map(Some);
        }
        self.rest = saved;
        Ok(None)
    }

    fn quoted(&mut self) -> Scanned<String> {
        self.want("\"")?;
        let mut out = String::new();
        loop {
            let Some(c) = self.rest.chars().next() else {
                return self.expected("a closing `\"`");
            };
            self.rest = &self.rest[c.len_utf8()..];
            match c {
                '"' => return Ok(out),
                '\\' => {
                    let escaped = self.rest.strip_prefix("u{").and_then(|r| r.split_once('}'));
                    let found =
                        escaped.and_then(|(hex, rest)| Some((u32::from_str_radix(hex, 16).ok()?, rest)));
                    match found.and_then(|(n, rest)| Some((char::from_u32(n)?, rest))) {
                        Some((c, rest)) => {
                            out.push(c);
                            self.rest = rest;
                        }
                        None => return self.expected("`u{hex}` after `\\`"),
                    }
                }
                c => out.push(c),
            }
        }
    }

    fn shape(&mut self) -> Scanned<Shape> {
        self.want("[")?;
        let mut dims = Vec::new();
        loop {
            let first = dims.is_empty();
            let dim = if self.eat("T") {
                Dim::Tokens
            } else if self.eat("R") {
                Dim::Outputs
            } else {
                Dim::Fixed(self.number("a dimension")?)
            };
            if !first && !matches!(dim, Dim::Fixed(_)) {
                return Err(format!(
                    "`{dim}` is not the first dimension: only that may be symbolic"
                ));
            }
            dims.push(dim);
            if !self.eat(",") {
                break;
            }
            if dims.len() == 3 {
                return self.expected("at most three dimensions");
            }
        }
        self.want("]")?;
        let shape = Shape::new(&dims);
        verify::bounded(&shape)?;
        Ok(shape)
    }

    fn tensor_type(&mut self) -> Scanned<TensorType> {
        let before = Scan { rest: self.rest };
        let name = self.word()?;
        let Some(dtype) = DType::from_name(name) else {
            return before.expected("an element type");
        };
        Ok(TensorType {
            dtype,
            shape: self.shape()?,
        })
    }

    fn value_type(&mut self) -> Scanned<ValueType> {
        if self.eat("batch") {
            return Ok(ValueType::Batch);
        }
        if self.eat("cache") {
            return Ok(ValueType::Cache(CacheId(self.number("a number")?)));
        }
        self.tensor_type().map(ValueType::Tensor)
    }

    fn end(&mut self) -> Scanned<()> {
        self.skip();
        if self.rest.is_empty() {
            Ok(())
        } else {
            self.expected("the end of the line")
        }
    }
}

struct Parser {
    graph: Graph,
    types: Vec<Option<ValueType>>,
    /// No text has more values than bytes; this bounds what a large number can make us allocate.
    most_values: usize,
}

impl Parser {
    fn line(&mut self, scan: &mut Scan<'_>) -> Scanned<()> {
        if scan.eat("weight ") {
            self.weight(scan)?;
        } else if scan.eat("cache ") {
            self.cache(scan)?;
        } else if scan.eat("value ") {
            let v = self.value(scan)?;
            scan.want(":")?;
            self.types[v.0 as usize] = Some(scan.value_type()?);
        } else if scan.eat("logits ") {
            if self.graph.logits.is_some() {
                return Err("the result is named twice".to_string());
            }
            self.graph.logits = Some(self.value(scan)?);
        } else {
            self.node(scan)?;
        }
        scan.end()
    }

    fn value(&mut self, scan: &mut Scan<'_>) -> Scanned<ValueId> {
        let v = scan.index("%")?;
        if v as usize >= self.most_values {
            return Err(format!("%{v}: values are numbered without gaps"));
        }
        if self.types.len() <= v as usize {
            self.types.resize(v as usize + 1, None);
        }
        Ok(ValueId(v))
    }

    fn weight(&mut self, scan: &mut Scan<'_>) -> Scanned<()> {
        let id = scan.index("w")? as usize;
        if id != self.graph.weights.len() {
            return Err(format!(
                "w{id} is declared, expected w{}",
                self.graph.weights.len()
            ));
        }
        let name = scan.quoted()?;
        let ty = scan.tensor_type()?;
        let (experts, rows, cols) = match *ty.shape.dims() {
            [Dim::Fixed(cols)] => (1, 1, cols),
            [Dim::Fixed(rows), Dim::Fixed(cols)] if rows > 1 => (1, rows, cols),
            // Shapes are bounded, so the product cannot overflow.
            [Dim::Fixed(experts), Dim::Fixed(rows), Dim::Fixed(cols)] if experts > 1 => {
                (experts, experts * rows, cols)
            }
            _ => {
                return Err(format!(
                    "a weight is [cols], [rows, cols] with two rows or more, or [experts, rows, cols] with two \
                     experts or more, found {ty}"
                ));
            }
        };
        let first_row = if scan.eat("first_row") {
            scan.want("=")?;
            scan.number("a number")?
        } else {
            0
        };
        self.graph.weights.push(WeightDecl {
            name,
            dtype: ty.dtype,
            first_row,
            rows,
            cols,
            experts,
        });
        Ok(())
    }

    fn cache(&mut self, scan: &mut Scan<'_>) -> Scanned<()> {
        let id = scan.index("c")? as usize;
        if id != self.graph.caches.len() {
            return Err(format!(
                "c{id} is declared, expected c{}",
                self.graph.caches.len()
            ));
        }
        let decl = if scan.eat("kv") {
            let num_kv_heads = scan.param("num_kv_heads")?;
            let head_dim = scan.param("head_dim")?;
            let window = if scan.eat("window") {
                scan.want("=")?;
                Some(scan.number("a number")?)
            } else {
                None
            };
            CacheDecl::Kv {
                num_kv_heads,
                head_dim,
                window,
                group: scan.param("group")?,
            }
        } else if scan.eat("state") {
            CacheDecl::State {
                bytes: scan.param("bytes")?,
            }
        } else {
            return scan.expected("`kv` or `state`");
        };
        self.graph.caches.push(decl);
        Ok(())
    }

    fn node(&mut self, scan: &mut Scan<'_>) -> Scanned<()> {
        let mut outputs = vec![self.value(scan)?];
        while scan.eat(",") {
            outputs.push(self.value(scan)?);
        }
        scan.want("=")?;
        let op = op(scan)?;
        let mut inputs = Vec::new();
        if !scan.eat(":") {
            inputs.push(self.value(scan)?);
            while scan.eat(",") {
                inputs.push(self.value(scan)?);
            }
            scan.want(":")?;
        }
        for (i, v) in outputs.iter().enumerate() {
            if i > 0 {
                scan.want(",")?;
            }
            self.types[v.0 as usize] = Some(scan.value_type()?);
        }
        let label = scan.quoted()?;
        self.graph.nodes.push(Node {
            op,
            inputs,
            outputs,
            label,
        });
        Ok(())
    }
}

/// Ops that take parameters in parentheses.
const PARAMETERISED: [&str; 16] = [
    "weight",
    "cache",
    "scale",
    "softcap",
    "act",
    "glu",
    "linear_glu",
    "rms_norm",
    "add_rms_norm",
    "rope",
    "rope_kv_write",
    "view",
    "attention",
    "route",
    "expert_glu",
    "linear_group",
];

fn op(scan: &mut Scan<'_>) -> Scanned<Op> {
    let before = Scan { rest: scan.rest };
    let name = scan.word()?;
    let plain = match name {
        "tokens" => Some(Op::Tokens),
        "positions" => Some(Op::Positions),
        "batch" => Some(Op::Batch),
        "embed" => Some(Op::Embed),
        "linear" => Some(Op::Linear),
        "add" => Some(Op::Add),
        "mul" => Some(Op::Mul),
        "take_outputs" => Some(Op::TakeOutputs),
        "kv_write" => Some(Op::KvWrite),
        "expert_down" => Some(Op::ExpertDown),
        _ => None,
    };
    if let Some(op) = plain {
        return Ok(op);
    }
    if !PARAMETERISED.contains(&name) {
        return before.expected("the name of an op");
    }
    scan.want("(")?;
    let op = match name {
        "weight" => Op::Weight(WeightId(scan.index("w")?)),
        "cache" => Op::Cache(CacheId(scan.index("c")?)),
        "scale" => Op::Scale(scan.number("a number")?),
        "softcap" => Op::Softcap(scan.number("a number")?),
        "act" => Op::Act(activation(scan)?),
        "glu" => Op::Glu(activation(scan)?),
        "linear_glu" => Op::Fused(FusedOp::LinearGlu(activation(scan)?)),
        "rms_norm" => Op::RmsNorm {
            eps: scan.param("eps")?,
        },
        "add_rms_norm" => Op::Fused(FusedOp::AddRmsNorm {
            eps: scan.param("eps")?,
        }),
        "rope" => Op::Rope(rope(scan)?),
        "rope_kv_write" => Op::Fused(FusedOp::RopeKvWrite(rope(scan)?)),
        "view" => Op::View(scan.shape()?),
        "attention" => Op::Attention(attention(scan)?),
        "route" => Op::Route(route(scan)?),
        "expert_glu" => Op::ExpertGlu(activation(scan)?),
        "linear_group" => Op::Fused(FusedOp::LinearGroup { bias: members(scan)? }),
        _ => return before.expected("the name of an op"),
    };
    scan.want(")")?;
    Ok(op)
}

fn activation(scan: &mut Scan<'_>) -> Scanned<Activation> {
    let before = Scan { rest: scan.rest };
    match scan.word()? {
        "silu" => Ok(Activation::Silu),
        "gelu_tanh" => Ok(Activation::GeluTanh),
        "gelu" => Ok(Activation::Gelu),
        "relu" => Ok(Activation::Relu),
        _ => before.expected("an activation"),
    }
}

fn members(scan: &mut Scan<'_>) -> Scanned<Vec<bool>> {
    let mut bias = Vec::new();
    loop {
        if scan.eat("bias") {
            bias.push(true);
        } else if scan.eat("plain") {
            bias.push(false);
        } else {
            return scan.expected("`bias` or `plain`");
        }
        if !scan.eat(",") {
            return Ok(bias);
        }
    }
}

fn attention(scan: &mut Scan<'_>) -> Scanned<AttnSpec> {
    let num_heads = scan.param("num_heads")?;
    scan.want(",")?;
    let num_kv_heads = scan.param("num_kv_heads")?;
    scan.want(",")?;
    let head_dim = scan.param("head_dim")?;
    scan.want(",")?;
    let scale = scan.param("scale")?;
    let sliding_window = scan.optional("sliding_window")?;
    let softcap = scan.optional("softcap")?;
    Ok(AttnSpec {
        num_heads,
        num_kv_heads,
        head_dim,
        scale,
        sliding_window,
        softcap,
    })
}

fn route(scan: &mut Scan<'_>) -> Scanned<RouterSpec> {
    let experts = scan.param("experts")?;
    scan.want(",")?;
    let experts_used = scan.param("experts_used")?;
    scan.want(",")?;
    scan.want("weights")?;
    scan.want("=")?;
    let weights = if scan.eat("softmax_used") {
        ExpertWeights::SoftmaxUsed
    } else if scan.eat("softmax_all") {
        ExpertWeights::SoftmaxAll
    } else {
        return scan.expected("`softmax_used` or `softmax_all`");
    };
    Ok(RouterSpec {
        experts,
        experts_used,
        weights,
    })
}

fn rope(scan: &mut Scan<'_>) -> Scanned<RopeSpec> {
    scan.want("style")?;
    scan.want("=")?;
    let style = if scan.eat("interleaved") {
        RopeStyle::Interleaved
    } else if scan.eat("half") {
        RopeStyle::Half
    } else {
        return scan.expected("`interleaved` or `half`");
    };
    scan.want(",")?;
    let dims = scan.param("dims")?;
    scan.want(",")?;
    let theta = scan.param("theta")?;
    let mut scaling = RopeScaling::None;
    if scan.eat(",") {
        scan.want("scaling")?;
        scan.want("=")?;
        let yarn = scan.eat("yarn");
        if !yarn {
            scan.want("linear")?;
        }
        scan.want(",")?;
        let factor = scan.param("factor")?;
        scaling = if yarn {
            yarn_scaling(scan, factor)?
        } else {
            RopeScaling::Linear { factor }
        };
    }
    Ok(RopeSpec {
        style,
        dims,
        theta,
        scaling,
    })
}

fn yarn_scaling(scan: &mut Scan<'_>, factor: f32) -> Scanned<RopeScaling> {
    scan.want(",")?;
    let original_context = scan.param("original_context")?;
    scan.want(",")?;
    let beta_fast = scan.param("beta_fast")?;
    scan.want(",")?;
    let beta_slow = scan.param("beta_slow")?;
    scan.want(",")?;
    let attention_factor = scan.param("attention_factor")?;
    Ok(RopeScaling::Yarn {
        factor,
        original_context,
        beta_fast,
        beta_slow,
        attention_factor,
    })
}
