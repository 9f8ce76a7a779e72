"""Names of the functions that torch's files call to create their tensors, and of other objects in them."""

REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
REBUILD_TENSOR_OF_DTYPE = "torch._utils._rebuild_tensor_v3"
GET_LAYOUT = "torch.serialization._get_layout"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"  # location of a shard's tensors
MEMORY_FORMATS = "_MEM_FORMAT_ENCODING"  # of a distributed checkpoint's metadata
