package nvmlsim

import (
	"errors"
	"fmt"
)

// Return is an NVML return code as an error. The zero value, Success, is never
// returned as an error by this package. Values and texts are nvml.h's.
type Return int32

// The codes that the simulator uses; a Fault can make it answer any code.
const (
	Success               Return = 0
	Uninitialized         Return = 1
	InvalidArgument       Return = 2
	NotSupported          Return = 3
	NoPermission          Return = 4
	NotFound              Return = 6
	InsufficientSize      Return = 7
	DriverNotLoaded       Return = 9
	Timeout               Return = 10
	LibraryNotFound       Return = 12
	GPUIsLost             Return = 15
	ResetRequired         Return = 16
	InUse                 Return = 19
	Memory                Return = 20
	NoData                Return = 21
	InsufficientResources Return = 23
	ArgumentVersion       Return = 25
	Unknown               Return = 999
)

// Error returns the text of nvmlErrorString.
func (r Return) Error() string {
	if s, ok := returnText(r); ok {
		return s
	}
	return fmt.Sprintf("unknown return code %d", int32(r))
}

func returnText(r Return) (string, bool) {
	texts := [...]string{
		0: "Success", 1: "Uninitialized", 2: "Invalid Argument", 3: "Not Supported", 4: "Insufficient Permissions",
		5: "Already Initialized", 6: "Not Found", 7: "Insufficient Size", 8: "Insufficient External Power",
		9: "Driver Not Loaded", 10: "Timeout", 11: "Interrupt Request Issue", 12: "NVML Shared Library Not Found",
		13: "Function Not Found", 14: "Corrupted infoROM", 15: "GPU is lost", 16: "GPU requires restart",
		17: "The operating system has blocked the request.", 18: "RM has detected an NVML/RM version mismatch.",
		19: "In use by another client", 20: "Insufficient Memory", 21: "No data", 22: "Requested vGPU operation is not available due to ECC mode",
		23: "Insufficient Resources", 24: "Freq not supported", 25: "Argument version mismatch", 26: "Deprecated",
		27: "Not ready", 28: "GPU not found", 29: "Invalid state",
	}
	if r == Unknown {
		return "Unknown Error", true
	}
	if r < 0 || int(r) >= len(texts) {
		return "", false
	}
	return texts[r], true
}

// ErrorString is nvmlErrorString: never empty.
func ErrorString(code int32) string { return Return(code).Error() }

// Code returns the code to hand to a C caller: Success for nil, the Return in
// err's chain, and Unknown for any other error.
func Code(err error) Return {
	if err == nil {
		return Success
	}
	if r, ok := errors.AsType[Return](err); ok {
		return r
	}
	return Unknown
}
