//! Fused = expansion, op by op on random data and over whole models.

use super::*;
use crate::eval::{Arg, Array, Context, eval_graph, eval_op, eval_plan};
use crate::graph::CacheId;
use crate::op::{Activation, RopeScaling, RopeSpec, RopeStyle};
use crate::plan::plan;
use crate::testing::{LIMITS, Only, PLAIN, Rng, Small, caches, random_weights, steps};
use crate::verify;

fn models() -> Vec<Small> {
    let mut out = vec![PLAIN];
    for i in 0..8u32 {
        out.push(Small {
            bias: i == 0 || i == 6,
            qk_norm: i == 1 || i == 6,
            post_norm: i == 2 || i == 6,
            freqs: i == 3 || i == 6,
            window: (i == 4 || i == 6).then_some(3),
            softcap: (i == 5 || i == 6).then_some(20.0),
            merged: i == 3,
            experts: i == 7,
        });
    }
    out
}

/// Logits of both steps.
fn run(graph: &Graph) -> Vec<Array> {
    verify::graph(graph).expect("the graph is valid");
    let mut caches = caches(&graph.caches);
    let weights = random_weights();
    let groups = graph.caches.iter().map(|c| match c {
        crate::graph::CacheDecl::Kv { group, .. } => group + 1,
        crate::graph::CacheDecl::State { .. } => 0,
    });
    let groups = groups.max().unwrap_or(0);
    steps(groups)
        .iter()
        .map(|b| eval_graph(graph, &*weights, &mut caches, b).expect("evaluates"))
        .collect()
}

fn worst(a: &[Array], b: &[Array]) -> f32 {
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().zip(b).flat_map(|(x, y)| {
        assert_eq!(x.dims, y.dims);
        x.data.iter().zip(&y.data)
    });
    pairs
        .map(|(x, y)| {
            assert!(x.is_finite() && y.is_finite());
            (x - y).abs()
        })
        .fold(0.0, f32::max)
}

#[test]
fn a_fused_model_computes_what_the_plain_one_does() {
    for model in models() {
        let plain = model.graph();
        let truth = run(&plain);
        let spread = truth[0].data.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        assert!(spread > 0.1, "{model:?}: logits say nothing");
        let everything = Only(|_: &FusedOp, _: &[ValueType]| true);
        let fused = fuse(plain.clone(), &everything);
        let names: Vec<&str> = fused.nodes.iter().map(|n| n.op.name()).collect();
        assert_eq!(
            names.iter().filter(|n| **n == "rope_kv_write").count(),
            2,
            "{model:?}"
        );
        assert_eq!(
            names.iter().filter(|n| **n == "add_rms_norm").count(),
            4,
            "{model:?}"
        );
        // Where gate has a bias the two stay a group.
        assert_eq!(
            names.iter().filter(|n| **n == "linear_group").count(),
            if model.bias { 4 } else { 2 }
        );
        assert_eq!(
            names.iter().filter(|n| **n == "linear_glu").count(),
            if model.bias || model.experts { 0 } else { 2 }
        );
        assert!(worst(&truth, &run(&fused)) < 1e-5, "{model:?}");
        assert!(worst(&truth, &run(&expand_graph(&fused))) == 0.0, "{model:?}");
    }
}

#[test]
fn a_plan_in_its_arena_computes_what_the_graph_does() {
    for model in models() {
        let truth = run(&model.graph());
        for all in [true, false] {
            let target = Only(move |_: &FusedOp, _: &[ValueType]| all);
            let plan = plan(model.graph(), &target, LIMITS).expect("plans");
            let mut caches = caches(&plan.caches);
            let weights = random_weights();
            let logits: Vec<Array> = steps(plan.cache_groups())
                .iter()
                .map(|b| eval_plan(&plan, &*weights, &mut caches, b).expect("evaluates"))
                .collect();
            assert!(worst(&truth, &logits) < 1e-5, "{model:?} fused: {all}");
        }
    }
}

#[test]
fn chunked_is_whole_and_batched_is_alone() {
    // The second step's last output row is the ninth token of the second sequence, fed in chunks of 3 and 6 beside
    // another sequence. Fed whole and alone it must give the same logits.
    let model = Small {
        window: Some(3),
        ..PLAIN
    };
    let graph = model.graph();
    let chunked = run(&graph).remove(1);
    let mut whole = steps(2).remove(1);
    whole.tokens = (0..9).map(|p| (p * 7 + 13) % 50).collect();
    whole.positions = (0..9).collect();
    whole.seqs = vec![crate::batch::SeqSpan {
        first_row: 0,
        rows: 9,
        context_len: 9,
    }];
    whole.output_rows = vec![8];
    for table in &mut whole.tables {
        table.blocks.drain(..table.first[1] as usize);
        table.first = vec![0, table.blocks.len() as u32];
        table.start = vec![0];
    }
    let alone =
        eval_graph(&graph, &*random_weights(), &mut caches(&graph.caches), &whole).expect("evaluates");
    assert_eq!(alone.data, chunked.data[chunked.cols()..]);
}

#[test]
fn a_group_splits_by_weight_type_where_the_target_wants_one() {
    use crate::dtype::DType;
    struct Mixed(Small);
    impl crate::builder::TensorIndex for Mixed {
        fn find(&self, name: &str) -> Option<(DType, usize, usize)> {
            let (_, rows, cols) = self.0.find(name)?;
            Some((
                if name.contains("attn_v") {
                    DType::F16
                } else {
                    DType::F32
                },
                rows,
                cols,
            ))
        }
    }
    let one_type = Only(|op: &FusedOp, inputs: &[ValueType]| {
        let ValueType::Tensor(first) = inputs[1] else {
            return false;
        };
        let same = |v: &ValueType| matches!(v, ValueType::Tensor(t) if t.dtype == first.dtype);
        matches!(op, FusedOp::LinearGroup { .. }) && inputs[1..].iter().all(same)
    });
    let mut graph = PLAIN.graph();
    for (i, w) in graph.weights.clone().iter().enumerate() {
        let (dtype, ..) = crate::builder::TensorIndex::find(&Mixed(PLAIN), &w.name).expect("known");
        graph.weights[i].dtype = dtype;
    }
    for node in graph.nodes.clone() {
        if let Op::Weight(id) = node.op {
            let ty = crate::infer::weight_type(&graph.weights[id.0 as usize]);
            graph.values[node.outputs[0].0 as usize] = ValueType::Tensor(ty);
        }
    }
    let fused = fuse(graph, &one_type);
    let labels: Vec<&str> = fused
        .nodes
        .iter()
        .filter(|n| n.op.name() == "linear_group")
        .map(|n| n.label.as_str())
        .collect();
    assert_eq!(
        labels,
        [
            "blk.0.attn_q+blk.0.attn_k",
            "blk.0.ffn_gate+blk.0.ffn_up",
            "blk.1.attn_q+blk.1.attn_k",
            "blk.1.ffn_gate+blk.1.ffn_up"
        ]
    );
}

/// Evaluates `node` and its expansion on the same random inputs.
fn fused_equals_expansion(op: FusedOp, inputs: &[(&str, Array)]) {
    let batch = steps(1).remove(0);
    let decl = crate::graph::CacheDecl::Kv {
        num_kv_heads: 2,
        head_dim: 8,
        window: None,
        group: 0,
    };
    let (mut ours, mut theirs) = (caches(&[decl]), caches(&[decl]));
    let arg = |(kind, array): &(&str, Array)| -> Arg<'static> {
        match *kind {
            "cache" => Arg::Cache(CacheId(0)),
            "batch" => Arg::Batch,
            "positions" => Arg::Positions,
            _ => Arg::Array(Box::leak(Box::new(array.clone()))),
        }
    };
    let args: Vec<Arg<'_>> = inputs.iter().map(arg).collect();
    let op = Op::Fused(op);
    let direct = eval_op(
        &op,
        &args,
        &mut Context {
            batch: &batch,
            caches: &mut ours,
        },
    )
    .expect("evaluates");

    let count = match &op {
        Op::Fused(FusedOp::LinearGroup { bias }) => bias.len(),
        Op::Fused(FusedOp::AddRmsNorm { .. }) => 2,
        _ => 1,
    };
    let n = inputs.len() as u32;
    let node = Node {
        op,
        inputs: (0..n).map(ValueId).collect(),
        outputs: (n..n + count as u32).map(ValueId).collect(),
        label: "x".into(),
    };
    let mut next = n + count as u32;
    let nodes = expand(&node, &|_| ValueType::Batch, &mut |_| {
        next += 1;
        ValueId(next - 1)
    });
    let mut values: Vec<Option<Arg<'static>>> = args.into_iter().map(Some).collect();
    values.resize(next as usize, None);
    for plain in &nodes {
        assert!(!matches!(plain.op, Op::Fused(_)), "an expansion is plain");
        let args: Vec<Arg<'_>> = plain
            .inputs
            .iter()
            .map(|v| values[v.0 as usize].expect("made before it is read"))
            .collect();
        let mut ctx = Context {
            batch: &batch,
            caches: &mut theirs,
        };
        let results = eval_op(&plain.op, &args, &mut ctx).expect("evaluates");
        for (v, r) in plain.outputs.iter().zip(results) {
            values[v.0 as usize] = Some(Arg::Array(Box::leak(Box::new(r))));
        }
    }
    for (out, array) in node.outputs.iter().zip(&direct) {
        let Some(Arg::Array(expanded)) = values[out.0 as usize] else {
            panic!("no output")
        };
        assert!(worst(std::slice::from_ref(array), std::slice::from_ref(expanded)) < 1e-6);
    }
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&ours.layers[0].k), bits(&theirs.layers[0].k));
    assert_eq!(bits(&ours.layers[0].v), bits(&theirs.layers[0].v));
}

#[test]
fn every_fused_op_equals_its_expansion() {
    let mut rng = Rng(42);
    let none = || Array::default();
    for round in 0..20 {
        let (t, k, m) = (10, 1 + round * 3, 1 + round * 2);
        let x = rng.array(&[t, k]);
        let (w1, w2, w3) = (rng.array(&[m, k]), rng.array(&[m + 1, k]), rng.array(&[m, k]));
        let bias = rng.array(&[m + 1]);
        let group = FusedOp::LinearGroup {
            bias: vec![false, true, false],
        };
        let inputs = [
            ("x", x.clone()),
            ("w", w1.clone()),
            ("w", w2),
            ("b", bias),
            ("w", w3.clone()),
        ];
        fused_equals_expansion(group, &inputs);
        for act in [
            Activation::Silu,
            Activation::GeluTanh,
            Activation::Gelu,
            Activation::Relu,
        ] {
            let inputs = [("x", x.clone()), ("g", w1.clone()), ("u", w3.clone())];
            fused_equals_expansion(FusedOp::LinearGlu(act), &inputs);
        }
        let (b, w) = (rng.array(&[t, k]), rng.array(&[k]));
        fused_equals_expansion(FusedOp::AddRmsNorm { eps: 1e-6 }, &[("a", x), ("b", b), ("w", w)]);
        for (style, factors) in [(RopeStyle::Half, false), (RopeStyle::Interleaved, true)] {
            let spec = RopeSpec {
                style,
                dims: 6,
                theta: 100.0,
                scaling: RopeScaling::Linear { factor: 3.0 },
            };
            let (k, v) = (rng.array(&[t, 2, 8]), rng.array(&[t, 2, 8]));
            let mut inputs = vec![
                ("cache", none()),
                ("k", k),
                ("v", v),
                ("batch", none()),
                ("positions", none()),
            ];
            if factors {
                inputs.push(("f", Array::new(&[3], vec![1.0, 2.5, 8.0])));
            }
            fused_equals_expansion(FusedOp::RopeKvWrite(spec), &inputs);
        }
    }
}
