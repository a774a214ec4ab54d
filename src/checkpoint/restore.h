#pragma once
// Restoring: a rank of any mesh takes its part of a checkpoint's state.
#include <filesystem>
#include <string>
#include <vector>

#include "backend/device.h"
#include "checkpoint/checkpoint.h"
#include "federation/scheduler.h"
#include "sharding/engine.h"
#include "sharding/mesh.h"

namespace strata {

// Compares the configuration of a checkpoint with that of the run that wants to continue it. Throws
// UsageError naming the first key that differs and must not: the model, precision, optimizer.kind, seed,
// data.sequence_length, data.groups; mesh.federate or the federation's rule between aggregations. Returns the
// other differences as "key: then -> now", for the log.
std::vector<std::string> compatible_changes(const CheckpointManifest& checkpoint, const Config& now);

// Not collective: every rank reads what it needs. Sets parameters, moments and outer state; with the same
// mesh bit by bit, with another one the same values. With another number of federation groups (at an
// aggregation point), m and v are averaged over the groups (in fp64, rounded once) and error feedback is
// dropped. Outer state that the checkpoint lacks starts anew from the parameters. Returns what was changed on
// the way, for the log; the same on all ranks. Throws DataError naming the file when something is damaged or
// missing; what was restored until then is to be thrown away or restored again.
std::vector<std::string> restore(const Checkpoint& checkpoint, const MeshGroups& groups, Device& device,
                                 Stream& compute, ShardingEngine& engine, FederationScheduler& federation);

}  // namespace strata
