//! File tests: each `.ir` file under `tests/filetests` holds a graph and, after a line `---`, what must come out.
//!
//! `verify/`: `ok` or the error. `fuse/`: the fused graph. `plan/`: the plan or the error. Every graph that parses must
//! also print to text that parses to the same graph.
//!
//! Lines `;! fused: a b` name the fused ops the target supports (`all` for every one), `;! no: a b` the plain ops it
//! lacks, `;! limits: T S R` the plan's limits, `;! align: n` the target's alignment.
//!
//! `UPDATE_EXPECT=1` rewrites the expected part.

use std::fs;
use std::path::{Path, PathBuf};

use dynair::plan::StepSize;
use dynair::{Graph, Limits, Op, Target, ValueType, fuse, plan, text, verify};

struct FileTarget {
    fused: Vec<String>,
    lacks: Vec<String>,
    align: usize,
}

impl Target for FileTarget {
    fn supports(&self, op: &Op, _inputs: &[ValueType]) -> bool {
        match op {
            Op::Fused(_) => self.fused.iter().any(|f| f == "all" || f == op.name()),
            _ => !self.lacks.iter().any(|l| l == op.name()),
        }
    }

    fn alignment(&self) -> usize {
        self.align
    }
}

struct Case {
    target: FileTarget,
    limits: Limits,
}

fn options(text: &str) -> Case {
    let mut case = Case {
        target: FileTarget {
            fused: Vec::new(),
            lacks: Vec::new(),
            align: 64,
        },
        limits: Limits {
            max_tokens: 8,
            max_seqs: 4,
            max_outputs: 2,
        },
    };
    for line in text.lines().filter_map(|l| l.strip_prefix(";!")) {
        let (key, rest) = line.split_once(':').expect("an option is `;! key: words`");
        let words: Vec<String> = rest.split_whitespace().map(str::to_string).collect();
        let number = |i: usize| words[i].parse::<usize>().expect("a number");
        match key.trim() {
            "fused" => case.target.fused = words,
            "no" => case.target.lacks = words,
            "align" => case.target.align = number(0),
            "limits" => {
                case.limits = Limits {
                    max_tokens: number(0),
                    max_seqs: number(1),
                    max_outputs: number(2),
                };
            }
            other => panic!("unknown option `{other}`"),
        }
    }
    case
}

fn outcome(kind: &str, input: &str) -> String {
    let case = options(input);
    let graph = match text::parse(input) {
        Ok(graph) => graph,
        Err(e) => return format!("error: {e}\n"),
    };
    let printed = graph.to_string();
    assert_eq!(
        text::parse(&printed).as_ref(),
        Ok(&graph),
        "printing and parsing changed the graph"
    );
    let checked = |graph: Graph| verify::graph(&graph).map(|()| graph);
    let result = match kind {
        "verify" => checked(graph).map(|_| "ok\n".to_string()),
        "fuse" => checked(graph).map(|g| {
            let fused = fuse::fuse(g, &case.target);
            verify::graph(&fused).expect("a fused graph is valid");
            verify::graph(&fuse::expand_graph(&fused)).expect("an expanded graph is valid");
            fused.to_string()
        }),
        "plan" => plan(graph, &case.target, case.limits).map(|p| {
            p.to_text(&StepSize {
                tokens: 2,
                outputs: 1,
                context_len: 10,
                kv_block: (1, 2),
            })
        }),
        other => panic!("no test of kind {other}"),
    };
    result.unwrap_or_else(|e| format!("error: {e}\n"))
}

fn run(kind: &str) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/filetests")
        .join(kind);
    let listed = fs::read_dir(&dir).expect("the folder of file tests is there");
    let mut files: Vec<PathBuf> = listed.map(|e| e.expect("readable").path()).collect();
    files.sort();
    assert!(!files.is_empty(), "no file tests in {}", dir.display());
    let update = std::env::var_os("UPDATE_EXPECT").is_some();
    let mut failures = Vec::new();
    for file in files {
        let content = fs::read_to_string(&file).expect("readable");
        let (input, expected) = content.split_once("---\n").unwrap_or((&content, ""));
        let found = outcome(kind, input);
        if update {
            fs::write(&file, format!("{input}---\n{found}")).expect("writable");
        } else if found != expected {
            failures.push(format!(
                "{}:\nexpected\n{expected}\nfound\n{found}",
                file.display()
            ));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn verify_files() {
    run("verify");
}

#[test]
fn fuse_files() {
    run("fuse");
}

#[test]
fn plan_files() {
    run("plan");
}
