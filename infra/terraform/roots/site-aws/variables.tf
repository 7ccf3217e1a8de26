variable "site" {
  description = "The site's name, where it is, and its machines: the pool contract of modules/contract, without the role."
  type = object({
    name          = string
    region        = string
    machine_types = list(string)
    gpu           = object({ type = string, count = number })
    min           = number
    max           = number
    spot          = optional(bool, true)
    disk_gb       = optional(number, 200)
  })
}

variable "image" {
  description = "Engine image, pinned by digest."
  type        = string
}

variable "gateways" {
  description = "The gateways to dial, each host:port: output `gateways` of root core."
  type        = list(string)
}

variable "model" {
  description = "The model to serve: a Hub id, or a folder of the image."
  type        = string
}

variable "settings" {
  description = "Further settings of the engine, as environment: MICO_SITE_SLOTS, MICO_SITE_OUTPUT_USD_PER_MTOK and the like. Nothing secret."
  type        = map(string)
  default     = {}
}

variable "token" {
  description = "The token that this site joins with. Never in plan or state."
  type        = string
  ephemeral   = true
  sensitive   = true
}

variable "secrets" {
  description = "Further secrets of the engine, as environment: HF_TOKEN for a model that needs a licence. Never in plan or state."
  type        = map(string)
  default     = {}
  ephemeral   = true
  sensitive   = true
}

variable "token_version" {
  description = "Raise it when the token or another secret changes; that is what makes Terraform write them."
  type        = number
  default     = 1
}
