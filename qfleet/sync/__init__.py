"""How several learners agree: what stands between a gradient and the parameters.

    learner ──gradient──▶ codec ──▶ all-reduce ─────────────▶ the same gradient everywhere ─▶ everybody's optimiser
                                ──▶ server shards ─▶ policy ─▶ commits ─▶ the shards' optimiser ─▶ parameters, pulled
    learner ──how far it moved in H updates──▶ codec ──▶ either ─▶ centre ─▶ learner          (localsgd, diloco, easgd, admm)

Reading order: policies (when pushes become versions), shard (a range of the parameters), codecs (bytes), local (learners
that train alone for a while), allreduce.
"""
