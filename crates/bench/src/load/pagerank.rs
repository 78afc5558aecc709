//! PageRank on a synthetic graph whose degrees follow a power law, like those of the web and of social
//! networks. Graph programs access memory in this way. Edges are read in order, once in each round. For each
//! edge the share of its source is read, which may be anywhere. The shares of a few sources are read all the
//! time, those of most sources rarely.

use super::Settings;
use super::region::PAGE_BYTES;
use super::touch;
use crate::measure::{Random, on_threads};
use serde_json::{Value, json};
use std::hash::{DefaultHasher, Hasher};
use std::sync::Mutex;
use std::time::Instant;

const ROUNDS: usize = 5;
const DAMPING: f64 = 0.85;
/// Edges that lead to a vertex, at least. The mean is twice as many.
const EDGES_LEAST: f64 = 8.0;
const EDGES_MOST: f64 = 10_000.0;
/// Bytes for each vertex: 16 edges, and a place in each of the other lists.
const BYTES_EACH: u64 = 16 * 4 + 3 * 8 + 4;

/// Ranks a graph that fills about `bytes`.
pub fn pagerank(settings: &Settings) -> Result<Value, String> {
    let count = (settings.bytes / BYTES_EACH) as usize;
    let threads = settings.threads.max(1);
    if count < 100 * threads {
        return Err(format!("{} bytes are too few", settings.bytes));
    }
    let began = Instant::now();
    let graph = Graph::new(count, settings.seed);
    let built = began.elapsed();
    let ranks = graph.ranks(threads);
    let ranked = began.elapsed() - built;
    // A vertex without a leaving edge passes its rank to no other vertex, so the sum is a bit below 1.
    let sum: f64 = ranks.iter().sum();
    if !(0.15..1.000_001).contains(&sum) {
        return Err(format!("the ranks add up to {sum}"));
    }
    let mut hasher = DefaultHasher::new();
    ranks.iter().for_each(|rank| hasher.write_u64(rank.to_bits()));
    Ok(json!({
        "pid": std::process::id(),
        "pages": count * BYTES_EACH as usize / PAGE_BYTES,
        "vertices": count,
        "edges": graph.sources.len(),
        "build_seconds": built.as_secs_f64(),
        "rank_seconds": ranked.as_secs_f64(),
        "sum": sum,
        // Each rank is summed in one order, so the digest is the same everywhere and with any number of
        // threads.
        "digest": format!("{:016x}", hasher.finish()),
    }))
}

/// The edges, grouped by the vertex that they lead to.
struct Graph {
    /// For each vertex, the start of its edges in `sources`; then the end of the last vertex's edges.
    starts: Vec<u64>,
    /// The source of each edge.
    sources: Vec<u32>,
    /// For each vertex, the number of edges that leave it.
    leaving: Vec<u32>,
}

impl Graph {
    fn new(count: usize, seed: u64) -> Graph {
        let mut random = Random::new(seed);
        let mut share = || (random.next() >> 11) as f64 / (1_u64 << 53) as f64;
        let spread = touch::spread(count);
        let mut graph = Graph {
            starts: Vec::with_capacity(count + 1),
            sources: Vec::with_capacity(count * 16),
            leaving: vec![0; count],
        };
        for _ in 0..count {
            graph.starts.push(graph.sources.len() as u64);
            // The Pareto distribution with exponent 2.
            let edges = (EDGES_LEAST / (1.0 - share()).sqrt()).min(EDGES_MOST) as usize;
            for _ in 0..edges {
                // The nth most popular vertex has a part of n^(-2/3). A vertex's place in memory is unrelated
                // to its popularity.
                let rank = (share().powi(3) * count as f64) as usize;
                let source = rank * spread % count;
                graph.leaving[source] += 1;
                graph.sources.push(source as u32);
            }
        }
        graph.starts.push(graph.sources.len() as u64);
        graph
    }

    fn ranks(&self, threads: usize) -> Vec<f64> {
        let count = self.leaving.len();
        let mut ranks = vec![1.0 / count as f64; count];
        let mut shares = vec![0.0; count];
        for _ in 0..ROUNDS {
            for ((share, rank), leaving) in shares.iter_mut().zip(&ranks).zip(&self.leaving) {
                *share = rank / f64::from((*leaving).max(1));
            }
            let each = count.div_ceil(threads);
            let parts: Vec<Mutex<&mut [f64]>> = ranks.chunks_mut(each).map(Mutex::new).collect();
            on_threads(parts.len(), |thread| {
                let mut part = parts[thread].lock().expect("each thread has its own");
                for (at, rank) in part.iter_mut().enumerate() {
                    *rank = self.rank(thread * each + at, &shares);
                }
            });
        }
        ranks
    }

    fn rank(&self, vertex: usize, shares: &[f64]) -> f64 {
        let edges = self.starts[vertex] as usize..self.starts[vertex + 1] as usize;
        let sum: f64 = self.sources[edges].iter().map(|source| shares[*source as usize]).sum();
        (1.0 - DAMPING) / self.leaving.len() as f64 + DAMPING * sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_small_graph_are_those_of_the_definition() {
        // 0 <- 1, 0 <- 2, 1 <- 2, 2 <- 0.
        let graph = Graph { starts: vec![0, 2, 3, 4], sources: vec![1, 2, 2, 0], leaving: vec![1, 1, 2] };
        let mut wanted = [1.0_f64 / 3.0; 3];
        for _ in 0..ROUNDS {
            let [a, b, c] = wanted;
            wanted = [b + c / 2.0, c / 2.0, a].map(|sum| 0.05 + DAMPING * sum);
        }
        for (found, wanted) in graph.ranks(2).iter().zip(wanted) {
            assert!((found - wanted).abs() < 1e-12, "{found} {wanted}");
        }
    }

    #[test]
    fn digest_does_not_depend_on_threads_and_few_vertices_have_most_edges() {
        let ranked = |threads| {
            let settings = Settings { bytes: 1 << 20, threads, seed: 5, ..Settings::default() };
            pagerank(&settings).unwrap()
        };
        let (one, three) = (ranked(1), ranked(3));
        assert_eq!(one["digest"], three["digest"]);
        assert!(one["edges"].as_u64() > Some(10 * one["vertices"].as_u64().unwrap()), "{one}");
        let mut leaving = Graph::new(10_000, 5).leaving;
        leaving.sort_unstable_by_key(|edges| std::cmp::Reverse(*edges));
        let part = |of: &[u32]| of.iter().map(|edges| u64::from(*edges)).sum::<u64>();
        // A tenth of the vertices has 0.1^(1/3) of all edges.
        assert!((44..49).contains(&(100 * part(&leaving[..1000]) / part(&leaving))));
    }
}
