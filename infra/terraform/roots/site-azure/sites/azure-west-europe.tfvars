# One A100 (80 GB) a machine, spot, from none to two machines. A 14-32 billion parameter model in bfloat16 fits.
site = {
  name          = "azure-west-europe"
  region        = "westeurope"
  machine_types = ["Standard_NC24ads_A100_v4"]
  gpu           = { type = "nvidia-a100", count = 1 }
  min           = 0
  max           = 2
  spot          = true
  disk_gb       = 200
}

model = "Qwen/Qwen2.5-14B-Instruct"

settings = {
  MICO_SITE_SLOTS        = "128"
  MICO_SITE_USD_PER_HOUR = "1.80" # of one machine: put in what you pay
}
