package nvmlsim

// FabricState is the state of a GPU's registration with Fabric Manager, if it is behind
// NVSwitches.
type FabricState string

// The states of a GPU's registration with Fabric Manager.
const (
	FabricReady      FabricState = ""
	FabricNotStarted FabricState = "not-started"
	FabricInProgress FabricState = "in-progress"
	FabricFailed     FabricState = "failed"
)

// FabricStates returns all states but FabricReady.
func FabricStates() []FabricState {
	return []FabricState{FabricNotStarted, FabricInProgress, FabricFailed}
}

// FabricInfo is nvmlGpuFabricInfo_t, of a fabric without other machines: cluster UUID and
// clique are zero.
type FabricInfo struct {
	// State is nvmlGpuFabricState_t: 0 not supported, 1 not started, 2 in progress, 3 completed.
	State uint8
	// Status is known only in state 3.
	Status Return
}

// FabricInfo answers nvmlDeviceGetGpuFabricInfo: NotSupported before Hopper (nvml.h), and the
// state not supported for a GPU that isn't behind NVSwitches.
func (g *GPU) FabricInfo() (FabricInfo, error) {
	if g.model.ArchitectureType() < architectureHopper {
		return FabricInfo{}, NotSupported
	}
	return fromState(g, "DeviceGetGpuFabricInfo", func(s GPUState) FabricInfo {
		board, _ := g.board()
		switch {
		case g.id.NVLink != nvlinkSwitch || len(board) < 2:
			return FabricInfo{}
		case s.Fabric == FabricNotStarted:
			return FabricInfo{State: 1}
		case s.Fabric == FabricInProgress:
			return FabricInfo{State: 2}
		case s.Fabric == FabricFailed:
			return FabricInfo{State: 3, Status: Unknown}
		default:
			return FabricInfo{State: 3}
		}
	})
}
